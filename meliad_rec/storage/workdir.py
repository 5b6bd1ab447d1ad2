"""Folders of runs, on a disk or in a bucket. Those on a disk can be locked."""

import fcntl
import importlib
import os
from pathlib import Path
import re

from absl import logging
from etils import epath
import jax

from meliad_rec.distributed import hosts

LOCK = '.lock'


def is_address(path: str | os.PathLike) -> bool:
  """Returns whether a path is a remote address, such as gs://BUCKET/FOLDER.

  Also returns True for gs:/BUCKET/FOLDER, because pathlib shortens the address
  to this form.
  """
  return bool(re.match(r'[A-Za-z][A-Za-z0-9+.-]*:/', os.fspath(path)))


def in_bucket(workdir: str | os.PathLike) -> bool:
  """Returns whether a folder is in Google Cloud Storage (gs://)."""
  return os.fspath(workdir).startswith('gs://')


def expand_home(path: str | os.PathLike) -> str:
  """Returns a path with ~/ at its start replaced by the home folder."""
  path = os.fspath(path)
  return os.path.expanduser(path) if path.startswith('~/') else path


def local(path: str | os.PathLike, what: str) -> Path:
  """Returns a local path as a pathlib.Path; rejects addresses such as gs://X.

  A ~/ at the start of the path is replaced by the home folder.

  Args:
    path: path or address that the user gave.
    what: the first words of the error message, such as 'A store'.

  Raises:
    ValueError: the path is an address.
  """
  if is_address(path):
    raise ValueError(
      f'{what} must be in a local or mounted folder, but {os.fspath(path)} is '
      'an address. Give a local path, and copy the content separately.'
    )
  return Path(expand_home(path))


def place(workdir: str | os.PathLike) -> Path | epath.Path:
  """Returns the folder of a run as a path on a disk or in a bucket.

  Raises:
    ValueError: `workdir` is an address that does not begin with gs://, perhaps
      because pathlib.Path has removed a slash.
  """
  name = os.fspath(workdir)
  if is_address(name) and not in_bucket(name):
    raise ValueError(
      f'{name} cannot hold a run: runs are stored in local or mounted folders'
      ' or in gs://BUCKET/FOLDER. Give one of these.'
    )
  return epath.Path(name) if in_bucket(name) else Path(expand_home(name))


def full_name(workdir: str | os.PathLike) -> str:
  """Returns the absolute path of the folder of a run, or its gs:// address.

  Raises:
    ValueError: as in `place`.
  """
  folder = place(workdir)
  return f'{folder if in_bucket(folder) else folder.resolve()}'


def check_writable(folder: Path | epath.Path) -> None:
  """Checks quickly that a run can write to a folder; creates nothing.

  If the folder does not exist, the nearest existing folder above it is checked.
  Folders in buckets are not checked.

  Raises:
    ValueError: the path that is checked is a file, or it cannot be written.
  """
  if in_bucket(folder):
    return
  there = next(f for f in (folder, *folder.absolute().parents) if f.exists())
  if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
    why = 'cannot be written' if there.is_dir() else 'is not a folder'
    raise ValueError(
      f'A run cannot be stored in {folder}: {there} {why}. Give another'
      ' --workdir.'
    )


def upload(source: Path, target: epath.Path) -> None:
  """Copies all files from a folder on the disk to a folder in a bucket.

  Objects in a bucket cannot be appended to, so a file that grows is written on
  the disk and copied whole. A failure is logged and not raised: it should not
  end a run, and the next upload may succeed.
  """
  for path in source.rglob('*'):
    if path.is_file():
      copy = target / path.relative_to(source).as_posix()
      # Libraries for buckets raise errors with no common class.
      try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
      except Exception as error:
        logging.error('%s was not written: %s', copy, error)


class BucketError(ValueError):
  """The error raised if a bucket cannot be read now, but perhaps later."""

  exit_code = 1


class RemovedError(ValueError):
  """The error raised if the folder of a run disappears while the run trains."""

  exit_code = 1


class Lock:
  """A lock that lets only one training run use a folder.

  Creates the folder if needed. The lock is held until `release` is called,
  until the process ends for any reason, or until the body of a `with` statement
  raises an error. A body that succeeds does not release it. On several hosts,
  every host must create a Lock, and process 0 holds it. Buckets have no locks:
  a log message asks the user to make sure that no other run uses the folder.

  Args:
    folder: the folder of the run.

  Raises:
    ValueError: another training run holds the lock, the folder cannot be
      written, or a run cannot be stored in this bucket.
    BucketError: the bucket cannot be read, perhaps only now.
  """

  def __init__(self, folder: Path | epath.Path):
    self._file, self._folder = None, folder
    problem = self._take(folder) if jax.process_index() == 0 else None
    if hosts.any_of(problem is not None):
      self.release()
      raise ValueError(
        problem or f'Process 0 cannot train in {folder}. See its error.'
      )

  def __enter__(self):
    return self

  def __exit__(self, kind, *_):
    if kind is not None:
      self.release()

  def check(self) -> None:
    """Checks that the folder is still the one that was locked.

    Otherwise, the run would write to a folder that was removed, and nobody
    could find the files.

    Raises:
      RemovedError: the folder was removed, renamed or replaced.
    """
    if self._file is None:
      return
    try:
      there = os.path.samestat(
        (self._folder / LOCK).stat(), os.fstat(self._file.fileno())
      )
    except FileNotFoundError:
      there = False
    if not there:
      raise RemovedError(
        f'The folder {self._folder} was removed, renamed or replaced while a'
        ' run trained in it, and the run has ended. Put it back, or start the'
        ' run again in another --workdir.'
      )

  def release(self) -> None:
    """Releases the lock; a second call does nothing."""
    if self._file is not None:
      self._file.close()
      self._file = None

  def _take(self, folder) -> str | None:
    """Takes the lock; returns None, or a sentence that says why it failed."""
    if in_bucket(folder):
      logging.info(
        'Buckets have no locks. Make sure that no other run trains in %s.',
        folder,
      )
      return _bucket_problem(folder)
    try:
      folder.mkdir(parents=True, exist_ok=True)
      self._file = (folder / LOCK).open('a')
    except OSError as error:
      return (
        f'The folder {folder} cannot be written ({error.strerror}). Give'
        ' another --workdir.'
      )
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      return (
        f'Another training run is in progress in {folder}. Stop it, or give'
        ' another --workdir.'
      )
    except OSError as error:  # Some mounted disks have no locks.
      logging.warning(
        '%s cannot be locked (%s). Make sure that no other run trains there.',
        folder,
        error.strerror,
      )
    return None


def _bucket_problem(folder) -> str | None:
  """Returns a message that says why a bucket cannot hold a run; None if it can.

  Args:
    folder: the folder of the run, whose address begins with gs://.

  Raises:
    BucketError: the problem may be temporary.
  """
  bucket = os.fspath(folder).removeprefix('gs://').partition('/')[0]
  try:
    storage = importlib.import_module('google.cloud.storage')
  except ImportError:
    return (
      'A run in a bucket needs google-cloud-storage. Install meliad_rec[gcs].'
    )
  # Libraries for buckets raise errors with no common class.
  try:
    client = storage.Client()
  except Exception as error:
    return (
      f'Google Cloud cannot be used ({_said(error)}). Log in with `gcloud auth'
      ' application-default login`, or set GOOGLE_CLOUD_PROJECT.'
    )
  try:
    client.get_bucket(bucket)  # As orbax does before each save.
  except Exception as error:
    if getattr(error, 'code', None) not in (403, 404):
      raise BucketError(
        f'The bucket {bucket} cannot be read now ({_said(error)}). Run the same'
        ' command again later.'
      ) from error
    return (
      f'The bucket {bucket} cannot be read ({error.code}). Give another'
      ' --workdir, or give the account the permission storage.buckets.get'
      ' in addition to those for objects.'
    )
  return None


def _said(error: Exception) -> str:
  """Returns the first line of an error's message, or else its class."""
  return str(error).partition('\n')[0].rstrip('.') or type(error).__name__
