"""Handling of Ctrl-C while a command starts or ends.

Python raises KeyboardInterrupt wherever the program is. During an import this
prints a long traceback, and some libraries catch the exception and go on. This
module imports nothing that takes time.
"""

from collections.abc import Iterator
import contextlib
import os
import signal
import sys


def end_at_once() -> None:
  """Lets Ctrl-C from now on print a line and end the process with code 130.

  This changes nothing if Ctrl-C is ignored, or if another handler than Python's
  own is installed.
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
  """Ends the process with this exit code, without Python's own clean-up."""
  with contextlib.suppress(OSError):
    sys.stdout.flush()
  os._exit(code)


def _end(number, frame):
  del number, frame
  os.write(2, b'interrupted\n')
  os._exit(130)
