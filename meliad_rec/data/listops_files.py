"""ListOps and logical inference from published files, one example in a line.

data/synthetic generates such examples by the same rules, with the same ids.
"""

from collections.abc import Iterator
import dataclasses
import functools
from pathlib import Path

import numpy as np

from meliad_rec.data.lra import LabeledSequences
from meliad_rec.data.split_files import check_pattern
from meliad_rec.data.split_files import files_of_splits
from meliad_rec.data.split_files import read_lines
from meliad_rec.data.vocabulary import Words

_DIGITS = tuple('0123456789')
_OPERATORS = '[MIN', '[MAX', '[MED', '[SM'
_RELATIONS = '=', '<', '>', '^', '|', 'v', '#'
_SYMBOLS = '(', ')', *'abcdef', 'and', 'or', 'not'
_ENDS = 'START', 'END'


@dataclasses.dataclass(frozen=True)
class _Files(LabeledSequences):
  """Base class of datasets of lines whose fields are separated by tabs.

  Attributes:
    path: pattern of the files, such as 'data/listops/{split}.tsv'; see
      split_files.py.
    max_length: maximum number of words of a sequence in train and validation;
      examples with a longer one are left out. None leaves out none.
    ends: whether a sequence has START and END.
    fetch: how to get the files, for the error message.
    validation_like_train: whether max_length also holds for validation.

  Raises:
    ValueError: there are no files, they cannot be read, or a line has another
      form. Raised on first use.
  """

  path: str
  max_length: int | None = None
  ends: bool = True
  fetch: str | None = None
  validation_like_train: bool = True

  def __post_init__(self):
    path = check_pattern('path', self.path, self._flag)
    object.__setattr__(self, 'path', path)

  @functools.cached_property
  def files(self) -> dict[str, tuple[Path, ...]]:
    """The file of each split."""
    return files_of_splits((self.path,), self.fetch, self._flag)

  @property
  def splits(self) -> tuple[str, ...]:
    return (*self.files,)

  @property
  def _ends(self) -> tuple[int, int]:
    start, end = self.vocabulary.encode(' '.join(_ENDS)).tolist()
    return start, end

  def examples(self, split: str) -> Iterator[tuple[str, list[np.ndarray], int]]:
    (path,) = self.files[split]
    short = {'train', 'validation'} if self.validation_like_train else {'train'}
    limited = self.max_length is not None and split in short
    for number, line in enumerate(read_lines(path), 1):
      try:
        texts, label = self._parse(line.split('\t'))
        sequences = [self.vocabulary.encode(text) for text in texts]
      except ValueError:
        # The names of the fields.
        if number == 1 and not {*line.split()} & {*self.vocabulary.words}:
          continue
        raise ValueError(
          f'{path}:{number} is not {self._form}, separated by tabs. Correct '
          f'it, or set {self._flag}.'
        ) from None
      if not limited or max(map(len, sequences)) <= self.max_length:
        yield f'{split}-{number}', sequences, label

  def _parse(self, fields: list[str]) -> tuple[list[str], int]:
    """Returns sequences and class of a line; ValueError if it has none."""
    raise NotImplementedError


class ListOpsFiles(_Files):
  """Expressions of ListOps, and their values from 0 to 9.

  A line has an expression and its value, in any order, as in train_d20s.tsv of
  Nangia and Bowman 2018 and basic_train.tsv of Tay et al. 2021. Words `(` and
  `)`, which make each expression a binary tree, are left out.
  """

  vocabulary = Words([*_DIGITS, *_OPERATORS, ']', *_ENDS])
  _flag = 'LISTOPS'
  _form = 'an expression and its value'

  def _parse(self, fields):
    first, second = fields
    if len(second.split()) > 1:
      first, second = second, first
    words = [word for word in first.split() if word not in ('(', ')')]
    if not words or second not in _DIGITS:
      raise ValueError
    return [' '.join(words)], int(second)


class LogicalInferenceFiles(_Files):
  """Pairs of formulas, and one of 7 relations between them.

  A line has a relation and two formulas, as in the files of Bowman et al. 2015:
  `<`, `( a ( and b ) )` and `a`.
  """

  vocabulary = Words([*_RELATIONS, *_SYMBOLS, *_ENDS])
  _flag = 'RELATIONS'
  _form = 'a relation and two formulas'

  def _parse(self, fields):
    relation, *formulas = fields
    if len(formulas) != 2 or not all(formulas):
      raise ValueError
    return formulas, _RELATIONS.index(relation)
