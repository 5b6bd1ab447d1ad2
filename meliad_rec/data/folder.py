"""Documents from your own text files, one each."""

from collections.abc import Iterator
import dataclasses
import functools
import glob
from pathlib import Path

from absl import logging

from meliad_rec.data.documents import SPLITS
from meliad_rec.data.splits import hashed

_DROP = 'drop'


@dataclasses.dataclass(frozen=True)
class Folder:
  """UTF-8 files, one document each, every byte kept as it is.

  The split of a file is, in this order: what split_file says (what it does not
  list, or calls "drop", is left out); the folder train/, validation/ or test/
  it is in; else a hash of its name, where one file in twenty goes to validation
  and one to test, at least one each.

  Attributes:
    path: a folder, read with its sub-folders, or a pattern such as 'a/**/*.md';
      what is the name of a folder that is there is no pattern.
    split_file: lines of name, tab, split (further columns are not read), below
      a line of headings or none; a name is a path inside the folder, or just
      the file's name without its ending.

  Raises:
    ValueError: no files, fewer than three with no split given, a bad split
      file, or a file that is not UTF-8.
  """

  path: str
  split_file: str | None = None

  @property
  def description(self) -> str:
    by = f', split by {Path(self.split_file).name}' if self.split_file else ''
    return f'folder: {Path(self.path).name}{by}'

  @property
  def splits(self) -> tuple[str, ...]:
    return tuple(s for s in SPLITS if s in set(self._split_of.values()))

  def read(self, split: str) -> Iterator[tuple[str, str]]:
    """The (name, text) of every file of a split, sorted by name."""
    for name, its in self._split_of.items():
      if its == split:
        yield name, _decode(self._files[name])

  @functools.cached_property
  def _root(self) -> Path:
    root = Path(self.path)
    while glob.has_magic(str(root)) and not root.is_dir():
      root = root.parent
    return root

  @functools.cached_property
  def _files(self) -> dict[str, Path]:
    inner = Path(self.path).relative_to(self._root)
    if inner.parts:
      pattern = str(Path(glob.escape(str(self._root)), inner))
      found = map(Path, glob.glob(pattern, recursive=True))
    else:
      found = self._root.rglob('*')
    files = {
      path.relative_to(self._root).as_posix(): path
      for path in found
      if path.is_file()
    }
    files = {
      name: path
      for name, path in sorted(files.items())
      if not any(part.startswith('.') for part in Path(name).parts)
    }
    if not files:
      raise ValueError(
        f'No files in {self.path}; give --path, in gin FOLDER, a folder of '
        "text files or a pattern such as 'texts/**/*.txt'."
      )
    return files

  @functools.cached_property
  def _split_of(self) -> dict[str, str]:
    if self.split_file:
      return self._listed()
    inside = {
      name: Path(name).parts[0]
      for name in self._files
      if Path(name).parts[0] in SPLITS and len(Path(name).parts) > 1
    }
    if inside:
      left = len(self._files) - len(inside)
      if left:
        logging.info(
          '%s: left out %d files that lie in none of the folders %s.',
          self.path,
          left,
          ', '.join(SPLITS),
        )
      return inside
    return hashed(
      self._files,
      self.path,
      'put them in train/, validation/ and test/, or give --split_file, in gin '
      'sources.Folder.split_file',
    )

  def _listed(self) -> dict[str, str]:
    short = {}
    for name in self._files:
      short.setdefault(Path(name).stem, []).append(name)
    chosen = {}
    lines = _decode(Path(self.split_file)).splitlines()
    for number, line in enumerate(lines, 1):
      name, split = (line.split('\t') + [''])[:2]
      names = [name] if name in self._files else short.get(name, [])
      if split not in (*SPLITS, _DROP):
        if not line.strip() or (number == 1 and not names):
          continue
        raise ValueError(
          f'{self.split_file}:{number} gives {name!r} the split {split!r}; '
          f'write name, tab and one of {", ".join(SPLITS)}, {_DROP}.'
        )
      if len(names) != 1:
        raise ValueError(
          f'{self.split_file}:{number} names {name!r}, which fits {len(names)} '
          f'of the files in {self.path}; write its path inside the folder.'
        )
      if names[0] in chosen:
        raise ValueError(
          f'{self.split_file}:{number} lists {names[0]!r} again; keep one line '
          'of each file.'
        )
      chosen[names[0]] = split
    chosen = {name: split for name, split in chosen.items() if split in SPLITS}
    if not chosen:
      raise ValueError(
        f'{self.split_file} lists no file; '
        f'write lines of name, tab and one of {", ".join(SPLITS)}.'
      )
    logging.info(
      '%s: %d files, %d of them listed in %s.',
      self.path,
      len(self._files),
      len(chosen),
      self.split_file,
    )
    return dict(sorted(chosen.items()))


def _decode(path: Path) -> str:
  try:
    return path.read_bytes().decode()
  except OSError as error:
    raise ValueError(
      f'{path} cannot be read ({error.strerror}); check the path.'
    ) from None
  except UnicodeDecodeError as error:
    raise ValueError(
      f'{path} is not UTF-8 (byte {error.start}); convert it, or keep it out '
      'of the folder.'
    ) from None
