"""The folder of a run: on a disk, and written by one training at a time."""

import fcntl
from pathlib import Path
import re

from absl import logging
import jax

from meliad_rec import hosts

LOCK = '.lock'


def local(workdir: str | Path) -> Path:
  """The folder as a path.

  Raises:
    ValueError: it is an address, such as gs://bucket/run.
  """
  # A Path has made one slash of the two.
  if re.match(r'[A-Za-z][A-Za-z0-9+.-]*:/', str(workdir)):
    raise ValueError(
      f'--workdir is {workdir}, and a run lies in a local or mounted folder;'
      ' mount the storage and give the path of a folder there.'
    )
  return Path(workdir)


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

  def __init__(self, folder: Path):
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
