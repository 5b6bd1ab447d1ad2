"""Source code as long documents: one document per Python package.

This is a small substitute for the GitHub dataset of Hutchins et al. 2022
(section 4). It needs no download, because it consists of the standard library
and the packages installed by pip.
"""

from collections.abc import Iterator
import dataclasses
from pathlib import Path
import sys
import sysconfig

from absl import logging

from meliad_rec.data.documents import SPLITS
from meliad_rec.data.splits import split_of

# Packages of generated tables rather than code.
_TABLES = frozenset({'encodings', 'pydoc_data'})


@dataclasses.dataclass(frozen=True)
class Code:
  """Python packages of this machine; hashes of their names decide the split.

  A module that is a single file counts as a package. About 90 % of the packages
  are in train, 5 % in validation and 5 % in test.

  A document holds the .py files of a package in sorted order, each after a
  comment line with its path. Files that are not UTF-8 or cannot be read, such
  as broken links, are skipped, and their number is logged.

  Attributes:
    max_bytes: maximum bytes of a document; the first file that would exceed it
      and all later files of the package are left out.
    min_bytes: minimum bytes of a document; packages with fewer are left out.
    installed: whether to read packages installed by pip besides the standard
      library.
  """

  max_bytes: int = 1_000_000
  min_bytes: int = 20_000
  installed: bool = True

  splits = SPLITS

  @property
  def description(self) -> str:
    installed = 'and installed packages ' if self.installed else ''
    version = '.'.join(map(str, sys.version_info[:3]))
    return (
      f'code: Python {version} standard library {installed}'
      f'of {self.min_bytes} to {self.max_bytes} bytes'
    )

  def read(self, split: str) -> Iterator[tuple[str, str]]:
    """Yields the (name, text) of each package of a split, sorted by name.

    Packages whose text has fewer than `min_bytes` bytes are left out.
    """
    packages = {
      name: path
      for name, path in self._packages().items()
      if split_of(name) == split
    }
    total_skipped = 0
    for name, path in sorted(packages.items()):
      text, skipped = self._package(path)
      total_skipped += skipped
      if len(text.encode()) >= self.min_bytes:
        yield name, text
    if total_skipped:
      logging.info(
        'code, %s: skipped %d files that are not UTF-8 or cannot be read.',
        split,
        total_skipped,
      )

  def _packages(self) -> dict[str, Path]:
    paths = sysconfig.get_paths()
    names = sys.stdlib_module_names - _TABLES
    packages = {
      path.stem: path
      for path in sorted(Path(paths['stdlib']).iterdir())
      if path.stem in names and _is_package(path)
    }
    if self.installed:
      # The two are often the same folder, and may not exist.
      folders = map(Path, dict.fromkeys((paths['purelib'], paths['platlib'])))
      for folder in filter(Path.is_dir, folders):
        # Sorted: of x.py and the folder x, every machine takes the same.
        for path in sorted(folder.iterdir()):
          if _is_package(path):
            packages.setdefault(path.stem, path)
    return packages

  def _package(self, path: Path) -> tuple[str, int]:
    """Returns the text of a package, and the number of files skipped."""
    parts, size, skipped = [], 0, 0
    for file in sorted(path.rglob('*.py')) if path.is_dir() else [path]:
      try:
        text = file.read_bytes().decode()
      except (OSError, UnicodeDecodeError):
        skipped += 1
        continue
      text = f'# {file.relative_to(path.parent).as_posix()}\n{text}\n'
      size += len(text.encode())
      if size > self.max_bytes:
        break
      parts.append(text)
    return ''.join(parts), skipped


def _is_package(path: Path) -> bool:
  return path.suffix == '.py' or (path.is_dir() and path.name.isidentifier())
