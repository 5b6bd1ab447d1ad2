"""Where the time of a run goes: what of it were training steps."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import functools
import time
from typing import TypeVar

import jax

Item = TypeVar('Item')

PARTS = ('step', 'compile', 'data wait', 'evaluation', 'checkpoint')


class Goodput:
  """Adds up seconds by part from when it is made; one for each host.

  Args:
    clock: seconds, from any beginning.
    compiled: seconds of compilation in this process so far. What is compiled
      within another part, as an evaluation's first step is, counts as compile.

  Attributes:
    seconds: by the names of PARTS.
  """

  def __init__(
    self,
    clock: Callable[[], float] = time.perf_counter,
    compiled: Callable[[], float] | None = None,
  ):
    self._clock, self._began = clock, clock()
    self._compiled = compiled or _compilations().total
    self.seconds = dict.fromkeys(PARTS, 0.0)

  @contextlib.contextmanager
  def on(self, part: str) -> Iterator[None]:
    """Counts the body, which holds no other part, to one of PARTS."""
    began, compiled = self._clock(), self._compiled()
    try:
      yield
    finally:
      compiled = self._compiled() - compiled
      spent = self._clock() - began
      if part != 'compile':
        spent -= compiled
        self.seconds['compile'] += compiled
      self.seconds[part] += spent

  def waiting(self, items: Iterator[Item]) -> Iterator[Item]:
    """The same items; the time until each is there is data wait."""
    with contextlib.closing(items):
      while True:
        with self.on('data wait'):
          item = next(items, _END)
        if item is _END:
          return
        yield item

  @property
  def whole(self) -> float:
    """Seconds since this was made."""
    return self._clock() - self._began

  def sentence(self) -> str:
    """'Time: 80.0 % step, 10.0 % compile, ..., 2.0 % other, of 100 s.'"""
    whole = self.whole
    parts = self.seconds | {'other': whole - sum(self.seconds.values())}
    shares = (f'{s / whole:.1%} {part}' for part, s in parts.items())
    return f'Time: {", ".join(shares)}, of {whole:.0f} s.'


_END = object()


class _Compilations:
  """Seconds that XLA has compiled for since this was made."""

  def __init__(self):
    self._seconds = 0.0
    jax.monitoring.register_event_duration_secs_listener(self._add)

  def total(self):
    return self._seconds

  def _add(self, event, seconds, **_):
    if event == '/jax/core/compile/backend_compile_duration':
      self._seconds += seconds


@functools.cache
def _compilations():
  """One for the process: jax has no way to take one listener away."""
  return _Compilations()
