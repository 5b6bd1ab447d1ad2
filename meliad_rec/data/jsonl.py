"""Documents from lines of JSON, in one file a split or one file of all."""

from collections.abc import Iterator
import dataclasses
import functools
import json
from pathlib import Path

from meliad_rec.data.documents import SPLITS
from meliad_rec.data.splits import hashed


@dataclasses.dataclass(frozen=True)
class Jsonl:
  """Lines of JSON objects, one document each; blank lines are none.

  The documents of a single file are split by a hash of their names: one in
  twenty goes to validation and one to test, at least one each.

  Attributes:
    path: one file; or a folder with train.jsonl, validation.jsonl and
      test.jsonl (any of them); or a pattern with {split} in it, such as
      'data/{split}-v2.jsonl'.
    field: of the object, a string: the document's text.

  Raises:
    ValueError: no such file, one file of fewer than three lines, or a line
      without that field.
  """

  path: str
  field: str = 'text'

  @property
  def description(self) -> str:
    place = Path(self.path if self._is_one else self._pattern)
    name = place.name if self._is_one else place.parent.name
    return f'jsonl: {name}, field {self.field}'

  @property
  def splits(self) -> tuple[str, ...]:
    if self._is_one:
      return tuple(s for s in SPLITS if s in set(self._split_of.values()))
    found = tuple(split for split in SPLITS if self._file(split).is_file())
    if not found:
      raise ValueError(
        f'No file {self._pattern} with {{split}} one of {", ".join(SPLITS)}; '
        'give --path, in gin JSONL, one file, a folder of them or a pattern '
        'with {split}.'
      )
    return found

  def read(self, split: str) -> Iterator[tuple[str, str]]:
    """The (name, text) of every line of a split; names are line numbers."""
    path, is_one = self._file(split), self._is_one
    for number, line in _lines(path):
      name = f'{path.name}:{number}'
      if is_one and self._split_of[name] != split:
        continue
      try:
        text = json.loads(line)[self.field]
        text.encode()
      except (ValueError, TypeError, KeyError, AttributeError):
        text = None
      if text is None:
        raise ValueError(
          f'{path}:{number} is not a JSON object with a Unicode string in '
          f'{self.field!r}; mend it, or name the text with --field, in gin '
          'FIELD.'
        )
      yield name, text

  @functools.cached_property
  def _split_of(self) -> dict[str, str]:
    """The split of each line of the one file."""
    path = Path(self.path)
    names = [f'{path.name}:{number}' for number, _ in _lines(path)]
    return hashed(
      names, self.path, 'put them in files train.jsonl, validation.jsonl, ...'
    )

  @property
  def _is_one(self) -> bool:
    return '{split}' not in self.path and Path(self.path).is_file()

  @property
  def _pattern(self) -> str:
    whole = '{split}' in self.path
    return self.path if whole else str(Path(self.path, '{split}.jsonl'))

  def _file(self, split: str) -> Path:
    if self._is_one:
      return Path(self.path)
    return Path(self._pattern.replace('{split}', split))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
  """Numbers, from 1, and what they hold, of lines that hold anything."""
  try:
    with path.open('rb') as file:
      for number, line in enumerate(file, 1):
        if line.strip():
          yield number, line
  except OSError as error:
    raise ValueError(
      f'{path} cannot be read ({error.strerror}); check the path.'
    ) from None
