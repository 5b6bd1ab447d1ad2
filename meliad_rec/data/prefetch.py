"""Prepares items in a background thread before they are needed."""

from collections.abc import Iterator
import queue
import threading
from typing import TypeVar

Item = TypeVar('Item')


def prefetch(items: Iterator[Item], depth: int) -> Iterator[Item]:
  """Yields all items; a thread prepares them and keeps up to `depth` ready.

  The thread ends when `items` ends or raises an error, or when the returned
  iterator is closed. If `items` raises an error, the caller first gets the
  items before it, and then the error.

  Raises:
    ValueError: depth is below 1.
  """
  if depth < 1:
    raise ValueError(f'The depth of prefetch must be at least 1, got {depth}.')
  return _prefetch(items, depth)


def _prefetch(items: Iterator[Item], depth: int) -> Iterator[Item]:
  ready = queue.Queue(depth)
  closed = threading.Event()
  end = object()

  def produce():
    error = None
    try:
      for item in items:
        ready.put((item, None))
        if closed.is_set():
          return
    except BaseException as caught:
      error = caught
    ready.put((end, error))

  thread = threading.Thread(target=produce, name='prefetch', daemon=True)
  thread.start()
  try:
    while True:
      item, error = ready.get()
      if error is not None:
        raise error
      if item is end:
        return
      yield item
  finally:
    closed.set()
    while thread.is_alive():
      while not ready.empty():
        ready.get_nowait()
      thread.join(0.01)
