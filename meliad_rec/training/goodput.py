"""Goodput: the share of a run's time that was spent on training steps."""

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
  """A timer that adds up the seconds of each part of a run on this host.

  Compilation counts as 'compile' even during another part, such as in the first
  step of an evaluation.

  Args:
    clock: returns seconds since any fixed time.
    compiled: returns the seconds that this process has spent on compilation;
      None: they are read from jax.

  Attributes:
    seconds: {part: seconds so far}, for each part in PARTS.
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
    """Counts the time of a `with` body as time of `part`, one of PARTS.

    Parts must not be nested.
    """
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
    """Yields the items; the time of waiting for them counts as 'data wait'.

    The iterator `items` is closed at the end.
    """
    with contextlib.closing(items):
      while True:
        with self.on('data wait'):
          item = next(items, _END)
        if item is _END:
          return
        yield item

  @property
  def whole(self) -> float:
    """Seconds since this object was created."""
    return self._clock() - self._began

  def sentence(self) -> str:
    """Returns 'Time: 80.0% step, 10.0% compile, ..., 2.0% other, of 100 s.'

    The shares are of the time since this object was created.
    """
    whole = self.whole
    parts = self.seconds | {'other': whole - sum(self.seconds.values())}
    shares = (f'{s / whole:.1%} {part}' for part, s in parts.items())
    return f'Time: {", ".join(shares)}, of {whole:.0f} s.'


_END = object()


class _Compilations:
  """A counter of the seconds of XLA compilation since it was created."""

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
  """Returns the only _Compilations of this process.

  There is only one, because jax cannot remove its listener.
  """
  return _Compilations()
