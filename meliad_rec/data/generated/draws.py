"""Random numbers that stay the same for ever, and rows that do not repeat."""

from collections.abc import Callable
from collections.abc import Container

import numpy as np

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
