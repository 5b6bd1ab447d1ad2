"""Requests to stop: SIGTERM or Ctrl-C ends a run after its current step.

On one host, the signals are caught here. On several hosts, jax's preemption
service catches SIGTERM and makes all hosts agree on the step after which they
stop. Ctrl-C is passed on to this service as SIGTERM.
"""

from collections.abc import Iterator
import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


@contextlib.contextmanager
def at_once() -> Iterator[None]:
  """Lets Ctrl-C and SIGTERM end the process at once within a `with` body.

  Use this around long work in C++, such as compilation, during which Python
  does not call its signal handlers. This changes nothing on several hosts, in
  notebooks, and in threads other than the main one.
  """
  numbers = signal.SIGINT, signal.SIGTERM
  previous = {}
  is_main = threading.current_thread() is threading.main_thread()
  if is_main and jax.process_count() == 1 and 'ipykernel' not in sys.modules:
    handlers = {number: signal.getsignal(number) for number in numbers}
    # Signals that are ignored, or not handled by Python, stay unchanged.
    previous = {n: each for n, each in handlers.items() if callable(each)}
  for number in previous:
    signal.signal(number, signal.SIG_DFL)
  try:
    yield
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)


class StopRequest:
  """Catches signals that ask this run to stop, from `listen` to `close`."""

  def __init__(self):
    self._number: int | None = None  # The first signal of this process.
    self._calls = 0  # Number of calls of `reached`.
    self._agreed = False
    # {signal: the handler that `listen` replaced}; None before `listen`.
    self._previous: dict[int, Any] | None = None

  def reached(self) -> bool:
    """Returns whether all hosts should save and stop now.

    Every host must call this at the same points: after each step, and after
    each segment of an evaluation.
    """
    self.listen()
    if jax.process_count() > 1:
      self._calls += 1
      calls = self._calls
      self._agreed = multihost_utils.reached_preemption_sync_point(calls)
      return self._agreed
    return self._number is not None

  @property
  def exit_code(self) -> int:
    """Exit code of the run: 0 if the run was not asked to stop.

    Otherwise the code is 128 plus the signal's number, as in shells: 130 for
    Ctrl-C, 143 for SIGTERM, and 143 if another host received the signal.
    """
    number = self._number or (signal.SIGTERM if self._agreed else None)
    return 0 if number is None else 128 + number

  def listen(self) -> None:
    """Catches SIGTERM and the first Ctrl-C from now on.

    A second Ctrl-C is left to the earlier handler. On several hosts, SIGTERM is
    left to jax. This does nothing in threads other than the main one, or if the
    signals are already caught.
    """
    # Python delivers signals to its main thread only, and on several hosts
    # SIGTERM belongs to jax.
    is_main = threading.current_thread() is threading.main_thread()
    if self._previous is not None or not is_main:
      return
    caught = [signal.SIGINT]
    if jax.process_count() == 1:
      caught.append(signal.SIGTERM)
    self._previous = {each: signal.getsignal(each) for each in caught}
    for each in caught:
      signal.signal(each, self._handle)

  def close(self) -> None:
    """Restores the signal handlers that `listen` replaced."""
    for each, handler in (self._previous or {}).items():
      signal.signal(each, handler)
    self._previous = None

  def _handle(self, number: int, frame: FrameType | None) -> None:
    del frame
    self._number = self._number or number
    name = signal.Signals(number).name
    again = ''
    if number == signal.SIGINT:
      signal.signal(signal.SIGINT, self._previous[signal.SIGINT])
      # In a background process of a shell, it is ignored.
      if callable(self._previous[signal.SIGINT]):
        again = ' Press Ctrl-C again to stop at once.'
      if jax.process_count() > 1:
        os.kill(os.getpid(), signal.SIGTERM)
    # Not `print`: the signal may have come while a line was being printed.
    line = f'\n{name}: saving and stopping after this step.{again}\n'
    os.write(sys.__stderr__.fileno(), line.encode())
