"""Items made ahead of their use, in a background thread."""

from collections.abc import Iterator
import queue
import threading
from typing import TypeVar

Item = TypeVar('Item')


def prefetch(items: Iterator[Item], depth: int) -> Iterator[Item]:
  """The same items, up to `depth` of them made ahead in a background thread.

  The thread ends with the items, with their error, which is raised here in
  its turn, or when this iterator is closed.
  """
  if depth < 1:
    raise ValueError(f'Prefetch needs a depth of at least 1; it is {depth}.')
  return _prefetch(items, depth)


def _prefetch(items: Iterator[Item], depth: int) -> Iterator[Item]:
  made = queue.Queue(depth)
  closed = threading.Event()
  end = object()

  def make():
    error = None
    try:
      for item in items:
        made.put((item, None))
        if closed.is_set():
          return
    except BaseException as caught:
      error = caught
    made.put((end, error))

  thread = threading.Thread(target=make, name='prefetch', daemon=True)
  thread.start()
  try:
    while True:
      item, error = made.get()
      if error is not None:
        raise error
      if item is end:
        return
      yield item
  finally:
    closed.set()
    while thread.is_alive():
      while not made.empty():
        made.get_nowait()
      thread.join(0.01)
