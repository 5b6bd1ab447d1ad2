"""How far a long pass is: a bar on a terminal, else a line now and then."""

import sys
import time
from typing import TextIO


class Countdown:
  """Counts up to a total.

  Args:
    total: of what is counted.
    unit: what that is.
    every: seconds between lines, where there is no terminal.
    stream: where to write; None: standard error.
  """

  def __init__(
    self,
    total: int,
    unit: str,
    every: float = 30.0,
    stream: TextIO | None = None,
  ):
    self._stream = stream or sys.stderr
    self._total, self._unit, self._every = total, unit, every
    self._began = self._last = time.monotonic()
    self._bar = None
    if self._stream.isatty():
      import tqdm

      self._bar = tqdm.tqdm(
        total=total,
        unit=unit,
        unit_scale=True,
        file=self._stream,
        dynamic_ncols=True,
        leave=False,
      )

  def show(self, done: int) -> None:
    """Says that so much is done, if it is time to."""
    if self._bar is not None:
      self._bar.update(done - self._bar.n)
      return
    now = time.monotonic()
    if now - self._last < self._every:
      return
    self._last = now
    rate = done / (now - self._began)
    left = (self._total - done) / rate
    print(
      f'{done:,} of {self._total:,} {self._unit}, {rate:,.0f} {self._unit}/s, '
      f'{left:.0f} s left',
      file=self._stream,
      flush=True,
    )

  def close(self) -> None:
    """Takes the bar away."""
    if self._bar is not None:
      self._bar.close()
