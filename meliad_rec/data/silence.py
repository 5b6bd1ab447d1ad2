"""stderr shut while a library is imported that writes there what nobody asked.

TensorFlow's C++ code tells of each GPU it did not find before any of its
settings is read. What is raised meanwhile is raised as ever.
"""

from collections.abc import Iterator
import contextlib
import os


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
  """Drops what this process writes to file descriptor 2."""
  kept = os.dup(2)
  try:
    with open(os.devnull, 'wb') as nowhere:
      os.dup2(nowhere.fileno(), 2)
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)
