"""Documents of labelled words, made of rows: episodes, programs, ..."""

import numpy as np

from meliad_rec.data.document import token_dtype
from meliad_rec.data.documents import Documents
from meliad_rec.data.documents import SPLITS
from meliad_rec.data.word_vocabulary import Words

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
