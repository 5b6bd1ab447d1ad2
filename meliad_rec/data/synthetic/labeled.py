"""Labeled documents, splits and random numbers for synthetic tasks.

Letters of this file: N rows, X tokens.
"""

from collections.abc import Callable
from collections.abc import Container

import numpy as np

from meliad_rec.data.dataset import Cached
from meliad_rec.data.documents import check_split
from meliad_rec.data.documents import Documents
from meliad_rec.data.documents import SPLITS
from meliad_rec.data.documents import token_dtype
from meliad_rec.data.vocabulary import Words

ENDS = 'START', 'END'
_CHUNK = 2**12  # Documents measured at once, to save memory.
# `distinct` gives up after drawing this many times the rows that are needed.
_TRIES = 20


def from_rows(
  split: str,
  tokens_NX: np.ndarray,
  labels_NX: np.ndarray,
  rows_per_document: int,
  vocabulary: Words,
) -> Documents:
  """Returns documents, each made of consecutive rows such as episodes.

  Args:
    split: name of the split; it begins the names of the documents.
    tokens_NX: ids of each row; zeros are dropped.
    labels_NX: label of each token; 0 at tokens that are not scored.
    rows_per_document: number of rows of each document; the last may have fewer.
    vocabulary: the vocabulary of the ids.
  """
  real_NX = tokens_NX != 0
  ends_N = np.cumsum(real_NX.sum(1), dtype=np.int64)
  ends = ends_N[rows_per_document - 1 :: rows_per_document]
  starts = np.concatenate([[0], ends])
  if starts[-1] != ends_N[-1]:
    starts = np.append(starts, ends_N[-1])
  return from_tokens(
    split, tokens_NX[real_NX], starts, labels_NX[real_NX], vocabulary
  )


def from_tokens(
  split: str,
  tokens: np.ndarray,
  starts: np.ndarray,
  labels: np.ndarray,
  vocabulary: Words,
) -> Documents:
  """Returns documents that are already concatenated; none may be empty.

  Args:
    split: name of the split; it begins the names of the documents.
    tokens: ids of all documents.
    starts: int64 [documents + 1], where each document begins in `tokens`, and
      where the last one ends.
    labels: label of each token; 0 at tokens that are not scored.
    vocabulary: the vocabulary of the ids.
  """
  dtype = token_dtype(vocabulary.size)
  tokens = tokens.astype(dtype, copy=False)
  # Bytes of each word and one space; the last word of a document has no space.
  sizes = np.array([0] + [len(word.encode()) + 1 for word in vocabulary.words])
  bytes_ = np.empty(len(starts) - 1, np.int64)
  for begin in range(0, len(bytes_), _CHUNK):
    chunk = starts[begin : begin + _CHUNK + 1]
    sizes_X = sizes[tokens[chunk[0] : chunk[-1]]]
    bytes_[begin : begin + _CHUNK] = (
      np.add.reduceat(sizes_X, chunk[:-1] - chunk[0]) - 1
    )
  return Documents(
    tokens=tokens,
    starts=starts,
    bytes_=bytes_,
    words=np.diff(starts),
    names=[f'{split}-{number}' for number in range(len(starts) - 1)],
    labels=labels.astype(dtype, copy=False),
  )


def total_rows(in_train: int) -> int:
  """Returns the number of rows of all splits together.

  Train has `in_train` rows; validation and test have a tenth as many each,
  rounded down, but at least 1.
  """
  return in_train + 2 * _tenth(in_train)


def split_rows(split: str, in_train: int) -> slice:
  """Returns which slice of the rows of all splits belongs to a split.

  The splits follow each other in the order of SPLITS; see `total_rows`.

  Raises:
    ValueError: there is no such split.
  """
  check_split(split, SPLITS)
  counts = in_train, _tenth(in_train), _tenth(in_train)
  ends = np.cumsum(counts)
  i = SPLITS.index(split)
  return slice(int(ends[i] - counts[i]), int(ends[i]))


def _tenth(in_train: int) -> int:
  return max(in_train // 10, 1)


def check_setting(
  name: str, value: int, least: int, most: int | None = None
) -> None:
  """Raises ValueError if a setting is not from `least` to `most`.

  Args:
    name: name of the setting in gin.
    value: value of the setting.
    least: least allowed value.
    most: greatest allowed value. None: no limit.
  """
  if value < least or (most is not None and value > most):
    needed = f'at least {least}' if most is None else f'from {least} to {most}'
    raise ValueError(
      f'{name.rpartition(".")[2]} must be {needed}, got {value}. Set {name}.'
    )


class WithEnds(Cached):
  """Base class of tasks with START and END as the last words of a vocabulary.

  Attributes:
    vocabulary: the vocabulary.
    ends: whether the vocabulary and each sequence have these two words.
  """

  vocabulary: Words
  ends: bool

  def _drop_ends(self) -> None:
    """Sets the vocabulary of a frozen dataclass."""
    if not self.ends:
      words = Words(self.vocabulary.words[: -len(ENDS)])
      object.__setattr__(self, 'vocabulary', words)

  @property
  def end_ids(self) -> tuple[int, ...]:
    """The ids before and after each sequence; () if there are none."""
    words = ' '.join(ENDS) if self.ends else ''
    return (*self.vocabulary.encode(words).tolist(),)


class Draws:
  """Random numbers from a raw stream that NumPy guarantees never to change.

  Args:
    seed: the seed.
    stream: further numbers, such as the index of a split; each choice gives an
      independent stream.

  Raises:
    ValueError: the seed is below 0.
  """

  def __init__(self, seed: int, *stream: int):
    if seed < 0:
      raise ValueError(
        f'The seed of the data must be at least 0, got {seed}. Set the seed of '
        'the task.'
      )
    seeds = np.random.SeedSequence(seed, spawn_key=stream)
    self._generator = np.random.PCG64(seeds)

  def below(self, end: int | np.ndarray, count: int) -> np.ndarray:
    """Returns random integers in [0, end): int64 [count].

    Args:
      end: the bound of all integers, or an array [count], the bound of each.
      count: number of integers.
    """
    raw = self._generator.random_raw(count)
    return (raw % np.asarray(end, np.uint64)).astype(np.int64)

  def between(self, least: int, most: int, count: int) -> np.ndarray:
    """Returns random integers from `least` to `most`: int64 [count]."""
    return least + self.below(most - least + 1, count)

  def bits(self, count: int) -> np.ndarray:
    """Returns random numbers of 32 bits each: uint32 [count]."""
    raw = self._generator.random_raw(-(-count // 2)).astype('<u8', copy=False)
    return raw.view('<u4')[:count]

  def between_0_and_1(self, count: int) -> np.ndarray:
    """Returns uniform numbers in the open interval (0, 1): float64 [count]."""
    return (self.bits(count) + 0.5) / 2**32

  def order(self, count: int) -> np.ndarray:
    """Returns a random permutation of 0, 1, ..., count - 1: int64 [count]."""
    return np.argsort(self._generator.random_raw(count), kind='stable')


def distinct(
  draw: Callable[[int], np.ndarray],
  count: int,
  settings: str,
  excluded: Container[bytes] = (),
) -> np.ndarray:
  """Returns `count` different rows, [count, ...], in the order drawn.

  Because all rows differ, splits that divide them do not overlap.

  Args:
    draw: takes a number and returns that many new rows.
    count: number of rows needed.
    settings: names of the settings that limit the number of different rows, for
      the error message.
    excluded: rows to leave out, each as `row.tobytes()`.

  Raises:
    ValueError: too few different rows were found.
  """
  rows = draw(count)
  for _ in range(_TRIES):
    first_index = {}
    for i, row in enumerate(rows):
      first_index.setdefault(row.tobytes(), i)
    rows = rows[[i for row, i in first_index.items() if row not in excluded]]
    if len(rows) >= count:
      return rows[:count]
    rows = np.concatenate([rows, draw(count)])
  raise ValueError(
    f'{count} different rows are needed, but {_TRIES * count} draws gave only '
    f'{len(rows) - count}. Change {settings}.'
  )
