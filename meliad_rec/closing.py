"""Closing several things at the end, without losing what went wrong first."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib

from absl import logging


@contextlib.contextmanager
def closing(*closes: Callable[[], None]) -> Iterator[None]:
  """Calls each at the end, in order, whatever the others raise.

  The first error, be it of the body, is raised; each later one is an error
  line.
  """
  first = None
  try:
    yield
  except BaseException as error:
    first = error
  for close in closes:
    try:
      close()
    except BaseException as error:
      if first is None:
        first = error
      else:
        logging.error('While closing: %s', error)
  if first is not None:
    raise first
