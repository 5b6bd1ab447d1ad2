"""The order in which lanes take documents: the same on every machine."""

import numpy as np


def shuffled(lengths: np.ndarray, seed: int, epoch: int) -> np.ndarray:
  """Documents that hold something, another order in each epoch."""
  full = np.flatnonzero(lengths)
  # numpy promises this raw stream for ever, but not that of permutation.
  bits = np.random.PCG64(np.random.SeedSequence((seed, epoch)))
  return full[np.argsort(bits.random_raw(len(full)), kind='stable')]


def as_they_lie(lengths: np.ndarray) -> np.ndarray:
  """Documents that hold something, as they are numbered."""
  return np.flatnonzero(lengths)


def longest_first(lengths: np.ndarray, segment: int) -> np.ndarray:
  """Documents that hold something, those of most segments first."""
  full = np.flatnonzero(lengths)
  segments = -(-lengths[full] // segment)
  return full[np.argsort(-segments, kind='stable')]
