"""Documents from lines of JSON: one file per split, or a single file."""

from collections.abc import Iterator
import dataclasses
import functools
import json
from pathlib import Path

from meliad_rec.data.documents import SPLITS
from meliad_rec.data.split_files import files_of_splits
from meliad_rec.data.splits import split_by_name
from meliad_rec.storage.workdir import expand_home

# Raised by a line that is not an object with strings, or is nested too deeply.
JSON_ERRORS = (
  ValueError,
  TypeError,
  LookupError,
  AttributeError,
  RecursionError,
)


@dataclasses.dataclass(frozen=True)
class Jsonl:
  """JSON objects, one per line. Each is a document; blank lines are skipped.

  The documents of a single file are split by a hash of file name and line
  number: about 5 % go to validation and 5 % to test, and at least one to each.

  Attributes:
    path: one file; or a folder with train.jsonl, validation.jsonl and so on; or
      a pattern that contains {split}, such as 'data/{split}-v2.jsonl'. See
      split_files.py for the names of splits.
    field: name of the field that holds the text, a string.
    fetch: how to get the files, for the error message.

  Raises:
    ValueError: there is no such file, it cannot be read, a single file has
      fewer than three documents, or a line is not an object in which `field` is
      a string. Raised on first use.
  """

  path: str
  field: str = 'text'
  fetch: str | None = None

  def __post_init__(self):
    object.__setattr__(self, 'path', expand_home(self.path))

  @property
  def description(self) -> str:
    name = Path(self.path).name
    if not self._is_single_file:
      name = Path(self._pattern).parent.name
    return f'jsonl: {name}, field {self.field}'

  @property
  def splits(self) -> tuple[str, ...]:
    if self._is_single_file:
      return tuple(s for s in SPLITS if s in set(self._split_of.values()))
    return tuple(self._files)

  def read(self, split: str) -> Iterator[tuple[str, str]]:
    """Yields ('FILE:LINE', text) of every document of a split.

    FILE is the name of the file, and LINE counts its lines from 1.
    """
    path = Path(self.path) if self._is_single_file else self._files[split]
    for number, line in numbered_lines(path):
      name = f'{path.name}:{number}'
      if self._is_single_file and self._split_of[name] != split:
        continue
      try:
        text = json.loads(line)[self.field]
        text.encode()
      except JSON_ERRORS:
        text = None
      if text is None:
        raise ValueError(
          f'{path}:{number} is not a JSON object with a Unicode string in '
          f'{self.field!r}. Correct it, or set --field (in gin: FIELD).'
        )
      yield name, text

  @functools.cached_property
  def _split_of(self) -> dict[str, str]:
    """{document name: split} for a single file."""
    path = Path(self.path)
    names = [f'{path.name}:{number}' for number, _ in numbered_lines(path)]
    return split_by_name(
      names,
      self.path,
      'Put them in the files train.jsonl, validation.jsonl and test.jsonl.',
    )

  @functools.cached_property
  def _is_single_file(self) -> bool:
    return '{split}' not in self.path and Path(self.path).is_file()

  @property
  def _pattern(self) -> str:
    if '{split}' in self.path:
      return self.path
    return str(Path(self.path, '{split}.jsonl'))

  @functools.cached_property
  def _files(self) -> dict[str, Path]:
    """{split: its file} if there is not a single file."""
    flags = (
      '--path (in gin: JSONL) to a file, a folder of such files or a pattern '
      'that contains {split}'
    )
    found = files_of_splits((self._pattern,), self.fetch, flags)
    return {split: file for split, (file,) in found.items()}


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
  """Yields (line number, content) of each line that is not blank.

  Lines are numbered from 1.

  Raises:
    ValueError: the file cannot be read.
  """
  try:
    with path.open('rb') as file:
      for number, line in enumerate(file, 1):
        if line.strip():
          yield number, line
  except OSError as error:
    raise ValueError(
      f'{path} cannot be read ({error.strerror}). Check the path.'
    ) from None
