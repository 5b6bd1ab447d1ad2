"""Files that users name or that runs keep: checked early, written whole.

A file that grows during a run is an Appender.
"""

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import secrets

from absl import logging
from etils import epath

from meliad_rec.storage.workdir import in_bucket


def check(path: str | os.PathLike, *suffixes: str) -> None:
  """Checks, before long work, that it will be possible to write a file.

  Args:
    path: path of the file, on a disk.
    *suffixes: the file name must end in one of them, if any are given.
      Otherwise a text file given by mistake would be overwritten.

  Raises:
    ValueError: the file cannot be written, or its name has another suffix.
  """
  path = Path(path)
  if suffixes:
    check_suffix(path, *suffixes)
  target = Path(os.path.realpath(path))
  if not target.parent.is_dir():
    raise ValueError(f'The folder of {path} does not exist. Create it first.')
  written = target if _is_device(target) else target.parent
  if target.is_dir() or not os.access(written, os.W_OK):
    raise ValueError(f'{path} cannot be written. Choose another file.')


def check_suffix(path: Path, *suffixes: str) -> None:
  """Raises ValueError if the name of a file ends in none of the suffixes."""
  if path.suffix not in suffixes:
    raise ValueError(
      f'{path} does not end in {" or ".join(suffixes)}. Give a name that does.'
    )


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
  """Writes a whole file or nothing, on a disk.

  A link stays, and the file that it names is replaced. What is no regular file,
  such as /dev/null or a pipe, is written directly.

  Yields:
    The path of a file to write, with the suffix of `path`. If no error occurs,
    it replaces `path`.
  """
  path = Path(os.path.realpath(path))
  if _is_device(path):
    yield path
    return
  # Opened like any other file, so that its permissions follow the umask.
  new = path.with_name(f'.{secrets.token_hex(4)}.{path.name}')
  try:
    yield new
    os.replace(new, path)
  finally:
    new.unlink(missing_ok=True)


def _is_device(path: Path) -> bool:
  """Returns whether a path exists and is neither a file nor a folder."""
  return path.exists() and not (path.is_file() or path.is_dir())


def write(path: Path | epath.Path, content: bytes | str) -> None:
  """Writes the whole file or nothing, on a disk or in a bucket."""
  if isinstance(content, str):
    content = content.encode()
  if in_bucket(path):
    path.write_bytes(content)  # An object appears when it is complete.
    return
  with replacing(path) as new:
    new.write_bytes(content)


class Appender:
  """A file on a disk to which a run appends.

  An error, such as a full disk, does not end the run: it is logged, and what
  could not be written is kept in memory and written before what comes next.

  Args:
    path: path of the file; it and its folder are created by the first `append`
      that has content.
  """

  def __init__(self, path: Path):
    self._path, self._file = path, None
    self._left, self._failed = b'', False

  def append(self, content: bytes) -> None:
    """Writes all that is left, and `content` after it."""
    self._left += content
    if not self._left:
      return
    try:
      if self._file is None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open('ab', buffering=0)
      while self._left:
        self._left = self._left[self._file.write(self._left) :]
      self._failed = False
    except OSError as error:
      if not self._failed:
        logging.error(
          '%s cannot be written (%s). The run continues, and writes it later if'
          ' that becomes possible.',
          self._path,
          error.strerror,
        )
      self._failed = True

  def close(self) -> None:
    """Tries again to write what is left, and closes the file."""
    self.append(b'')
    if self._file is not None:
      self._file.close()
