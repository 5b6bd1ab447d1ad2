"""Documents from lines of JSON, in one file a split."""

from collections.abc import Iterator
import dataclasses
import json
from pathlib import Path

from meliad_rec.data.documents import SPLITS


@dataclasses.dataclass(frozen=True)
class Jsonl:
  """Lines of JSON objects, one document each, in a file for each split.

  Attributes:
    path: a folder with train.jsonl, validation.jsonl and test.jsonl (any of
      them), or a pattern with {split} in it, such as 'data/{split}-v2.jsonl'.
    field: of the object, a string: the document's text.

  Raises:
    ValueError: no such file, or a line without that field.
  """

  path: str
  field: str = 'text'

  @property
  def description(self) -> str:
    return f'jsonl: {Path(self._pattern).parent.name}, field {self.field}'

  @property
  def splits(self) -> tuple[str, ...]:
    found = tuple(split for split in SPLITS if self._file(split).is_file())
    if not found:
      raise ValueError(
        f'No file {self._pattern} with {{split}} one of {", ".join(SPLITS)}; '
        'give --path a folder of them or a pattern with {split}.'
      )
    return found

  def read(self, split: str) -> Iterator[tuple[str, str]]:
    """The (name, text) of every line of a split; names are line numbers."""
    path = self._file(split)
    with path.open('rb') as file:
      for number, line in enumerate(file, 1):
        try:
          text = json.loads(line)[self.field]
          text.encode()
        except (ValueError, TypeError, KeyError, AttributeError):
          text = None
        if text is None:
          raise ValueError(
            f'{path}:{number} is not a JSON object with a Unicode string in '
            f'{self.field!r}; give --field the name of the text.'
          )
        yield f'{path.name}:{number}', text

  @property
  def _pattern(self) -> str:
    whole = '{split}' in self.path
    return self.path if whole else str(Path(self.path, '{split}.jsonl'))

  def _file(self, split: str) -> Path:
    return Path(self._pattern.replace('{split}', split))
