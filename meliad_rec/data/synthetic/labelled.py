"""Documents of labelled words, made of rows: episodes, programs, ...

Random numbers that stay the same for ever, and rows that do not repeat.
"""

from collections.abc import Callable
from collections.abc import Container

import numpy as np

from meliad_rec.data.documents import Documents
from meliad_rec.data.documents import SPLITS
from meliad_rec.data.documents import token_dtype
from meliad_rec.data.vocabulary import Words

_DOCUMENTS = 2**12  # Measured at once, to save memory.


def total(in_train: int) -> int:
  """Rows of all splits; validation and test have a tenth of train's each."""
  return in_train + 2 * _tenth(in_train)


def rows_of(split: str, in_train: int) -> slice:
  """Which of all rows are a split's.

  Raises:
    ValueError: there is no such split.
  """
  if split not in SPLITS:
    raise ValueError(
      f'This task has no split {split!r}; it has {", ".join(SPLITS)}.'
    )
  counts = in_train, _tenth(in_train), _tenth(in_train)
  ends = np.cumsum(counts)
  place = SPLITS.index(split)
  return slice(int(ends[place] - counts[place]), int(ends[place]))


def documents(
  split: str,
  tokens_NX: np.ndarray,
  labels_NX: np.ndarray,
  per_document: int,
  vocabulary: Words,
) -> Documents:
  """Rows as documents.

  Args:
    split: for the documents' names.
    tokens_NX: ids of each row; 0 where it has none.
    labels_NX: of each token; 0 where it is not scored.
    per_document: rows that follow one another in a document; the last one has
      what is left.
    vocabulary: what the ids mean.
  """
  real_NX = tokens_NX != 0
  ends_N = np.cumsum(real_NX.sum(1), dtype=np.int64)
  starts = np.concatenate([[0], ends_N[per_document - 1 :: per_document]])
  if starts[-1] != ends_N[-1]:
    starts = np.append(starts, ends_N[-1])
  return laid(split, tokens_NX[real_NX], starts, labels_NX[real_NX], vocabulary)


def laid(
  split: str,
  tokens: np.ndarray,
  starts: np.ndarray,
  labels: np.ndarray,
  vocabulary: Words,
) -> Documents:
  """Documents that lie one behind the other, none of them empty.

  Args:
    split: for the documents' names.
    tokens: ids of all.
    starts: int64 [documents + 1], where each begins.
    labels: of each token; 0 where it is not scored.
    vocabulary: what the ids mean.
  """
  dtype = token_dtype(vocabulary.size)
  tokens = tokens.astype(dtype, copy=False)
  # Each word and the space behind it, but for the last of a document.
  sizes = np.array([0] + [len(word.encode()) + 1 for word in vocabulary.words])
  bytes_ = np.empty(len(starts) - 1, np.int64)
  for begin in range(0, len(bytes_), _DOCUMENTS):
    here = starts[begin : begin + _DOCUMENTS + 1]
    sizes_X = sizes[tokens[here[0] : here[-1]]]
    bytes_[begin : begin + _DOCUMENTS] = (
      np.add.reduceat(sizes_X, here[:-1] - here[0]) - 1
    )
  return Documents(
    tokens=tokens,
    starts=starts,
    bytes_=bytes_,
    words=np.diff(starts),
    names=[f'{split}-{number}' for number in range(len(starts) - 1)],
    labels=labels.astype(dtype, copy=False),
  )


def check(name: str, value: int, least: int, most: int | None = None) -> None:
  """Raises ValueError where a setting, 'recall.Recall.letters', is too low."""
  if value < least or (most is not None and value > most):
    needed = f'{least} or more' if most is None else f'from {least} to {most}'
    raise ValueError(
      f'{name.rpartition(".")[2]} is {value}; it must be {needed}. Set {name}.'
    )


def _tenth(in_train: int) -> int:
  return max(in_train // 10, 1)


# A task that yields so few new rows in so many tries has hardly any more.
_TRIES = 20


class Draws:
  """Whole numbers from a raw stream that numpy promises to keep.

  Args:
    seed: another one gives others.
    stream: another one gives others too, such as the number of a split that is
      drawn without those before it.

  Raises:
    ValueError: the seed is below 0.
  """

  def __init__(self, seed: int, *stream: int):
    if seed < 0:
      raise ValueError(
        f"The seed of the task's data is {seed}; set it to 0 or more."
      )
    seeds = np.random.SeedSequence(seed, spawn_key=stream)
    self._bits = np.random.PCG64(seeds)

  def below(self, end: int | np.ndarray, count: int) -> np.ndarray:
    """int64 [count] from 0 to below `end`, which is 1 or more, or an array."""
    raw = self._bits.random_raw(count)
    return (raw % np.asarray(end, np.uint64)).astype(np.int64)

  def bits(self, count: int) -> np.ndarray:
    """uint32 [count], 32 random bits each."""
    raw = self._bits.random_raw(-(-count // 2)).astype('<u8', copy=False)
    return raw.view('<u4')[:count]

  def between_0_and_1(self, count: int) -> np.ndarray:
    """float64 [count], neither 0 nor 1."""
    return (self.bits(count) + 0.5) / 2**32

  def order(self, count: int) -> np.ndarray:
    """int64 [count], numbers from 0 on, shuffled."""
    return np.argsort(self._bits.random_raw(count), kind='stable')


def distinct(
  draw: Callable[[int], np.ndarray],
  count: int,
  how: str,
  taken: Container[bytes] = (),
) -> np.ndarray:
  """Rows [count, ...] of which no two are the same, in the order drawn.

  So no split can hold what another one does.

  Args:
    draw: so many rows, anew at each call.
    count: rows wanted.
    how: which settings give more, for the error.
    taken: the bytes of rows that are left out.

  Raises:
    ValueError: there are hardly so many.
  """
  rows = draw(count)
  for _ in range(_TRIES):
    first = {}
    for place, row in enumerate(rows):
      first.setdefault(row.tobytes(), place)
    fresh = [place for row, place in first.items() if row not in taken]
    rows = rows[fresh]
    if len(rows) >= count:
      return rows[:count]
    rows = np.concatenate([rows, draw(count)])
  raise ValueError(
    f'{count} different ones are needed, and {_TRIES * count} tries gave '
    f'{len(rows) - count}. Set {how}.'
  )
