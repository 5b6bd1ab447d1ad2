"""Paths, and not addresses, which pathlib would take for a folder here."""

import os
from pathlib import Path
import re


def is_address(path: str | os.PathLike) -> bool:
  """Whether it is one, as gs://BUCKET/FOLDER, or one that pathlib spoilt."""
  return bool(re.match(r'[A-Za-z][A-Za-z0-9+.-]*:/', os.fspath(path)))


def local(path: str | os.PathLike, what: str) -> Path:
  """The path.

  Args:
    path: as it was given.
    what: lies there, at the beginning of a sentence.

  Raises:
    ValueError: it is an address.
  """
  if is_address(path):
    raise ValueError(
      f'{what} lies in a local or mounted folder, and {os.fspath(path)} is an '
      'address; give a path, and copy what it holds there or from there.'
    )
  return Path(path)
