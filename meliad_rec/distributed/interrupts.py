"""Ctrl-C while a command starts or ends; imports nothing that takes time.

Python raises KeyboardInterrupt wherever it is. In an import this prints a long
traceback, and some libraries catch it and go on.
"""

from collections.abc import Iterator
import contextlib
import os
import signal
import sys


def end_at_once() -> None:
  """Lets Ctrl-C end the process with a line and exit code 130 from now on.

  It changes nothing if Ctrl-C is ignored or already handled differently.
  """
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)


@contextlib.contextmanager
def raising() -> Iterator[None]:
  """Lets Ctrl-C raise KeyboardInterrupt, as usual, within a `with` body."""
  ends = signal.getsignal(signal.SIGINT) is _end
  if ends:
    signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    yield
  finally:
    if ends:
      signal.signal(signal.SIGINT, _end)


def leave(code: int) -> None:
  """Ends the process without the clean-up at the end of Python."""
  with contextlib.suppress(OSError):
    sys.stdout.flush()
  os._exit(code)


def _end(number, frame):
  del number, frame
  os.write(2, b'interrupted\n')
  os._exit(130)
