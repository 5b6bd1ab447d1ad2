"""The folder of a run: where it is, and one training at a time writes it.

Paths, and not addresses, which pathlib would take for a folder here.
"""

import fcntl
import importlib
import os
from pathlib import Path
import re

from absl import logging
from etils import epath
import jax

from meliad_rec.distributed import hosts


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


LOCK = '.lock'


def place(workdir: str | os.PathLike) -> Path | epath.Path:
  """The folder as a path, on a disk or in a bucket of Google Cloud Storage.

  Raises:
    ValueError: it is another address, or one that pathlib.Path has spoilt.
  """
  name = os.fspath(workdir)
  if is_address(name) and not in_bucket(name):
    raise ValueError(
      f'--workdir is {name}, and a run lies in a local or mounted folder or in'
      ' gs://BUCKET/FOLDER; give the path or the address of one.'
    )
  return epath.Path(workdir) if in_bucket(name) else Path(workdir)


def in_bucket(workdir: str | os.PathLike) -> bool:
  """Whether it is an address in a bucket."""
  return os.fspath(workdir).startswith('gs://')


class Lock:
  """The right to train in a folder, which is made if it is not there.

  It ends with `release`, with the process, however that ends, and where the
  body of its `with` fails; a body that does not fail leaves it held. On several
  hosts process 0 holds it, and every host must make one.

  Args:
    folder: of the run.

  Raises:
    ValueError: another training holds it, or the folder cannot be written.
  """

  def __init__(self, folder: Path | epath.Path):
    self._file = None
    refusal = self._take(folder) if jax.process_index() == 0 else None
    if hosts.any_of(refusal is not None):
      self.release()
      raise ValueError(refusal or f'Process 0 cannot train in {folder}.')

  def __enter__(self):
    return self

  def __exit__(self, kind, *_):
    if kind is not None:
      self.release()

  def release(self) -> None:
    """Gives it back; a second call does nothing."""
    if self._file is not None:
      self._file.close()
      self._file = None

  def _take(self, folder) -> str | None:
    """Why it cannot be had, or None."""
    if in_bucket(folder):
      logging.info(
        'Buckets have no locks: see that no other training runs in %s.', folder
      )
      return _missing(folder)
    try:
      folder.mkdir(parents=True, exist_ok=True)
      self._file = (folder / LOCK).open('a')
    except OSError as error:
      return (
        f'The folder {folder} cannot be written ({error.strerror}); give'
        ' another --workdir.'
      )
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      return (
        f'Another training is running in {folder}; stop it, or give another'
        ' --workdir.'
      )
    except OSError as error:  # Some mounted disks have no locks.
      logging.warning(
        '%s cannot be locked (%s): see that no other training runs there.',
        folder,
        error.strerror,
      )
    return None


def _missing(folder) -> str | None:
  """What a bucket needs and is not there, or None."""
  bucket = os.fspath(folder).removeprefix('gs://').partition('/')[0]
  try:
    storage = importlib.import_module('google.cloud.storage')
  except ImportError:
    return (
      'A run in a bucket needs google-cloud-storage; install meliad_rec[gcs].'
    )
  try:
    storage.Client().get_bucket(bucket)  # As orbax does before each save.
  except Exception as error:
    if getattr(error, 'code', None) not in (403, 404):
      raise  # It may pass.
    return (
      f'The bucket {bucket} cannot be asked what it is ({error.code}); give'
      ' another --workdir, or the account the right storage.buckets.get beside'
      ' those to its objects.'
    )
  return None
