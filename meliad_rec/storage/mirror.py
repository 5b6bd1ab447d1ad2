"""A folder in a bucket, by way of one on the disk: for files that grow.

Objects of a bucket cannot be added to, and what draws and traces writes to a
disk. So these files are written on the disk, and brought to the bucket whole.
"""

import os
from pathlib import Path
import tempfile

from absl import logging
from etils import epath


class Mirror:
  """A folder on the disk for another, or that itself if it is on the disk.

  Args:
    folder: a path, or an address such as gs://bucket/run.
    fetched: names of files to begin with, where the bucket has them.

  Attributes:
    folder: on the disk; one for a bucket goes with the process.
  """

  def __init__(self, folder: str | os.PathLike, fetched: tuple[str, ...] = ()):
    self._far, self._temporary = None, None
    # A Path is on the disk; of an address it would have lost a slash.
    if '://' not in os.fspath(folder):
      self.folder = Path(folder)
      return
    self._far = epath.Path(folder)
    self._temporary = tempfile.TemporaryDirectory()
    self.folder = Path(self._temporary.name, self._far.name)
    self.folder.mkdir()
    for name in fetched:
      if (self._far / name).exists():
        (self.folder / name).write_bytes((self._far / name).read_bytes())
    self._brought = self._marks()

  def sync(self) -> None:
    """Brings what has changed to the bucket; on the disk nothing is to do.

    What cannot be brought is said, and tried again the next time: no run shall
    end for its figures.
    """
    if self._far is None:
      return
    for path, mark in self._marks().items():
      if mark == self._brought.get(path):
        continue
      far = self._far / path.relative_to(self.folder).as_posix()
      try:
        far.parent.mkdir(parents=True, exist_ok=True)
        far.write_bytes(path.read_bytes())
      # What libraries of buckets raise has no class in common.
      except Exception as error:
        logging.error('%s cannot be written, yet: %s', far, error)
      else:
        self._brought[path] = mark

  def _marks(self):
    """What tells of each file whether it has changed."""
    files = (path for path in self.folder.rglob('*') if path.is_file())
    found = {path: path.stat() for path in files}
    return {p: (stat.st_size, stat.st_mtime_ns) for p, stat in found.items()}
