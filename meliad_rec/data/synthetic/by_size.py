r"""Base class of synthetic tasks that are tested at greater sizes than trained.

Letters of this file: N sequences, T tokens.
"""

from collections.abc import Mapping
import contextlib
import dataclasses
import functools
import re
from typing import Self

import numpy as np

from meliad_rec.data.dataset import Cached
from meliad_rec.data.documents import check_split
from meliad_rec.data.documents import SPLITS
from meliad_rec.data.documents import token_dtype
from meliad_rec.data.synthetic import labeled
from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.vocabulary import Words

_CHUNK_TOKENS = 2**22  # Tokens drawn at once, to save memory.
_LAST = '_last'
# A split such as test_128_last or test_40_256.
_OF_A_SIZE = r'test_(\d+)(?:_(\d+))?(?=_|$)'
Sizes = tuple[int | tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class BySize(Cached):
  """A task with test splits of greater sizes than train.

  Each subclass says what its size is, such as the number of tokens. The splits
  train, validation and test have sequences of `min_size` to `max_size`, all
  sizes equally likely. A split such as test_128 has sequences of size 128, and
  test_40_256 has all sizes from 40 to 256. `documents` takes such names of any
  size, so that a trained model can be tested at sizes that its configuration
  does not list. Sequences are drawn independently, so short ones occur more
  than once, and in train as well as in test.

  Subclasses implement `vocabulary`, `draw` and `guess`.

  Attributes:
    sequences: number of sequences in train.
    min_size, max_size: bounds of the size of a sequence in train, validation
      and test.
    test_sizes: sizes of the further test splits that `splits` names; (40, 256)
      in place of a size is all sizes from 40 to 256.
    test_sequences: number of sequences in validation and in each test split.
    seed: seed of the sequences.
  """

  sequences: int = 160_000
  min_size: int = 3
  max_size: int = 32
  test_sizes: Sizes = (64, 128, 256, 512)
  test_sequences: int = 2_000
  seed: int = 0

  # Whether a split test_128_last scores the last label of each sequence only.
  has_last = False

  def __post_init__(self):
    sizes = self.test_sizes
    if not isinstance(sizes, tuple | list) or not all(map(_is_size, sizes)):
      raise ValueError(
        'test_sizes must be whole numbers such as (64,), or pairs such as '
        f'((40, 256),), got {sizes!r}. Set {self.setting("test_sizes")}.'
      )
    for name in ('sequences', 'test_sequences'):
      labeled.check_setting(self.setting(name), getattr(self, name), 1)
    sizes = {'min_size': self.min_size, 'max_size': self.max_size}
    tests = (least for least, _ in self._tests.values())
    sizes |= {'test_sizes': min(tests, default=self.min_size)}
    for name, size in sizes.items():
      labeled.check_setting(self.setting(name), size, self.smallest)
    labeled.check_setting(
      self.setting('max_size'), self.max_size, self.min_size
    )

  @property
  def smallest(self) -> int:
    """The least size that the task has."""
    return 1

  @property
  def vocabulary(self) -> Words:
    raise NotImplementedError

  def largest(self, size: int) -> int:
    """Returns how many numbers it takes to draw a sequence, about."""
    return size

  def draw(
    self, size_N: np.ndarray, draws: Draws
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens_NT and labels_NT, integers; id 0 where there is none.

    Args:
      size_N: size of each sequence.
      draws: the random numbers.
    """
    raise NotImplementedError

  def draw_train(
    self, size_N: np.ndarray, draws: Draws
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns sequences for train, in the form of `draw`."""
    return self.draw(size_N, draws)

  def guess(self) -> float:
    """Returns the error rate from 0 to 1 of a uniform guess."""
    raise NotImplementedError

  @classmethod
  def setting(cls, name: str) -> str:
    """Returns the name of a setting in gin."""
    return f'{cls.__module__.rpartition(".")[2]}.{cls.__name__}.{name}'

  @functools.cached_property
  def _tests(self) -> dict[str, tuple[int, int]]:
    """{further test split: its least and greatest size}."""
    bounds = ((n, n) if isinstance(n, int) else n for n in self.test_sizes)
    return {
      '_'.join(map(str, ['test', *dict.fromkeys(pair)])): pair
      for pair in bounds
    }

  @functools.cached_property
  def splits(self) -> tuple[str, ...]:
    """Names of the splits."""
    more = [*self._tests]
    lasts = [name + _LAST for name in more if self.has_last]
    return *SPLITS, *more, *lasts

  def documents(self, split):
    task = self._with(split)
    return super().documents(split) if task is self else task.documents(split)

  def _with(self, split: str) -> Self:
    """Returns the task with a split of any size, or itself if it has it.

    Raises:
      ValueError: the task has no such split.
    """
    task = self
    if split not in self.splits and (size := re.match(_OF_A_SIZE, split)):
      sizes = int(size[1]), int(size[2] or size[1])
      with contextlib.suppress(ValueError):  # The task has no such size.
        task = dataclasses.replace(self, test_sizes=(sizes,))
    check_split(split, task.splits)
    return task

  def _documents(self, split):
    """Makes one document of each sequence."""
    name = split.removesuffix(_LAST)
    N = self.sequences if name == 'train' else self.test_sequences
    if name in SPLITS:
      draws = Draws(self.seed, SPLITS.index(name))
      size_N = draws.between(self.min_size, self.max_size, N)
    else:
      least, most = self._tests[name]
      if least == most:
        draws, size_N = Draws(self.seed, len(SPLITS), most), np.full(N, most)
      else:
        draws = Draws(self.seed, len(SPLITS), least, most)
        size_N = draws.between(least, most, N)
    draw = self.draw_train if name == 'train' else self.draw
    tokens, labels, lengths = [], [], []
    step = max(_CHUNK_TOKENS // self.largest(int(size_N.max())), 1)
    for begin in range(0, N, step):
      part_N = size_N[begin : begin + step]
      tokens_NT, labels_NT = draw(part_N, draws)
      if split.endswith(_LAST):
        labels_NT = _only_last(labels_NT)
      real_NT = tokens_NT != 0
      lengths.append(real_NT.sum(1))
      dtype = token_dtype(self.vocabulary.size)
      tokens.append(tokens_NT[real_NT].astype(dtype))
      labels.append(labels_NT[real_NT].astype(dtype))
    starts = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    return labeled.from_tokens(
      split,
      np.concatenate(tokens),
      starts.astype(np.int64),
      np.concatenate(labels),
      self.vocabulary,
    )

  def baselines(self, split: str) -> Mapping[str, float]:
    """Returns {name: error rate from 0 to 1} of a random guess."""
    self._with(split)  # Checks the name.
    return {'uniform': self.guess()}


def _is_size(size) -> bool:
  """Returns whether an entry of test_sizes is one size, or a pair of them."""
  match size:
    case int():
      return True
    case [int(least), int(most)]:
      return least <= most
    case _:
      return False


def _only_last(labels_NT: np.ndarray) -> np.ndarray:
  """Returns the labels, of which only the last of each sequence is not 0."""
  T = labels_NT.shape[1]
  last_N = T - 1 - (labels_NT[:, ::-1] != 0).argmax(1)
  return np.where(np.arange(T) == last_N[:, None], labels_NT, 0)
