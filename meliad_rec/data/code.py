"""Source code as long documents: each installed Python package is one.

The paper's GitHub set in small (Hutchins et al. 2022, section 4): the standard
library and whatever pip has installed, with no download.
"""

from collections.abc import Iterator
import dataclasses
from pathlib import Path
import sys
import sysconfig

from absl import logging

from meliad_rec.data.documents import SPLITS
from meliad_rec.data.splits import split_of

# Generated tables of characters and of help text, hardly code.
_TABLES = frozenset({'encodings', 'pydoc_data'})


@dataclasses.dataclass(frozen=True)
class Code:
  """Packages of this Python, split by a hash of each one's name: 90/5/5 %.

  A document is the package's .py files in sorted order, each after a comment
  line with its path inside the package. Files that cannot be read (a link that
  leads nowhere, for instance) or are not UTF-8 are left out and counted.

  Attributes:
    max_bytes: of a package; further files are left out, and so is a file that
      would pass it.
    min_bytes: smaller packages are left out.
    installed: read what pip has installed too, not only the standard library.
  """

  max_bytes: int = 1_000_000
  min_bytes: int = 20_000
  installed: bool = True

  splits = SPLITS

  @property
  def description(self) -> str:
    what = 'and installed packages ' if self.installed else ''
    version = '.'.join(map(str, sys.version_info[:3]))
    return (
      f'code: Python {version} standard library {what}'
      f'of {self.min_bytes} to {self.max_bytes} bytes'
    )

  def read(self, split: str) -> Iterator[tuple[str, str]]:
    """The (name, text) of every package of a split, sorted by name."""
    packages = {
      name: path
      for name, path in self._packages().items()
      if split_of(name) == split
    }
    unread = 0
    for name, path in sorted(packages.items()):
      text, skipped = self._package(path)
      unread += skipped
      if len(text.encode()) >= self.min_bytes:
        yield name, text
    if unread:
      logging.info(
        'code, %s: left out %d files that are not UTF-8 or cannot be read.',
        split,
        unread,
      )

  def _packages(self) -> dict[str, Path]:
    paths = sysconfig.get_paths()
    names = sys.stdlib_module_names - _TABLES
    found = {
      path.stem: path
      for path in Path(paths['stdlib']).iterdir()
      if path.stem in names and _is_package(path)
    }
    if self.installed:
      # Often one and the same; some Pythons name folders that are not there.
      folders = map(Path, dict.fromkeys((paths['purelib'], paths['platlib'])))
      for folder in filter(Path.is_dir, folders):
        for path in folder.iterdir():
          if _is_package(path):
            found.setdefault(path.stem, path)
    return found

  def _package(self, path: Path) -> tuple[str, int]:
    parts, total, unread = [], 0, 0
    for file in sorted(path.rglob('*.py')) if path.is_dir() else [path]:
      try:
        text = file.read_bytes().decode()
      except (OSError, UnicodeDecodeError):
        unread += 1
        continue
      text = f'# {file.relative_to(path.parent).as_posix()}\n{text}\n'
      total += len(text.encode())
      if total > self.max_bytes:
        break
      parts.append(text)
    return ''.join(parts), unread


def _is_package(path: Path) -> bool:
  return path.suffix == '.py' or (path.is_dir() and path.name.isidentifier())
