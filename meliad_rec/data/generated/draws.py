"""Random numbers that stay the same for ever, and rows that do not repeat."""

from collections.abc import Callable

import numpy as np

# A task that yields so few new rows in so many tries has hardly any more.
_TRIES = 20


class Draws:
  """Whole numbers from a raw stream that numpy promises to keep.

  Args:
    seed: another one gives others.
  """

  def __init__(self, seed: int):
    self._bits = np.random.PCG64(np.random.SeedSequence(seed))

  def below(self, end: int | np.ndarray, count: int) -> np.ndarray:
    """int64 [count] from 0 to below `end`, which is 1 or more, or an array."""
    raw = self._bits.random_raw(count)
    return (raw % np.asarray(end, np.uint64)).astype(np.int64)


def distinct(
  draw: Callable[[int], np.ndarray], count: int, how: str
) -> np.ndarray:
  """Rows [count, ...] of which no two are the same, in the order drawn.

  So no split can hold what another one does.

  Args:
    draw: so many rows, anew at each call.
    count: rows wanted.
    how: which settings give more, for the error.

  Raises:
    ValueError: there are hardly so many.
  """
  rows = draw(count)
  for _ in range(_TRIES):
    first = {}
    for place, row in enumerate(rows):
      first.setdefault(row.tobytes(), place)
    rows = rows[list(first.values())]
    if len(rows) >= count:
      return rows[:count]
    rows = np.concatenate([rows, draw(count)])
  raise ValueError(
    f'{count} different ones are needed, and {_TRIES * count} tries gave '
    f'{len(rows) - count}. Set {how}.'
  )
