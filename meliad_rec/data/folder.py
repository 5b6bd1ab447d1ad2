"""Documents from text files, one document per file."""

from collections.abc import Iterator
import dataclasses
import functools
import glob
import os
from pathlib import Path

from absl import logging

from meliad_rec.data.documents import SPLITS
from meliad_rec.data.split_files import read_text
from meliad_rec.data.splits import split_by_name
from meliad_rec.storage.workdir import expand_home

_DROP = 'drop'
_ADVICE = 'Convert it, or remove it from the folder.'


@dataclasses.dataclass(frozen=True)
class Folder:
  """UTF-8 files, one document each; line endings and all else are kept.

  The split of a file is determined by the first of these that applies:
  - split_file, if given; files that it marks "drop" or omits are left out;
  - the subfolder train/, validation/ or test/ that contains the file, if there
    are files in any of these subfolders; all other files are left out;
  - a hash of the file's path inside the folder: about 5 % of files go to
    validation and 5 % to test, and at least one file to each.

  Links are followed. Files and folders whose names begin with a dot are
  skipped.

  Attributes:
    path: a folder, read with its subfolders, or a pattern such as 'a/**/*.md'.
      The files of a pattern are inside the folder that comes before its first
      wildcard, here 'a'. If a folder has exactly this name, path is that folder
      and not a pattern.
    split_file: a file in which each line has a name, a tab and a split. Further
      columns and a header line are ignored. A name is a path inside the folder,
      or a file name without its suffix. A split is train, validation, test or
      drop.

  Raises:
    ValueError: there are no files, fewer than three files are to be split by
      hash, the split file is invalid, a link leads nowhere, into a circle or to
      a file that is read already, or a file is not UTF-8 or cannot be read.
      Raised on first use.
  """

  path: str
  split_file: str | None = None

  def __post_init__(self):
    object.__setattr__(self, 'path', expand_home(self.path))

  @property
  def description(self) -> str:
    by = f', split by {Path(self.split_file).name}' if self.split_file else ''
    return f'folder: {Path(self.path).name}{by}'

  @property
  def splits(self) -> tuple[str, ...]:
    return tuple(s for s in SPLITS if s in set(self._split_of.values()))

  def read(self, split: str) -> Iterator[tuple[str, str]]:
    """Yields (path inside the folder, text) of every file of a split.

    Files are sorted by path.
    """
    for name, its_split in self._split_of.items():
      if its_split == split:
        yield name, read_text(self._files[name], _ADVICE)

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
      found = _files_in(self._root)
    found = {path.relative_to(self._root).as_posix(): path for path in found}
    shown = {
      name: path
      for name, path in sorted(found.items())
      if not any(part.startswith('.') for part in Path(name).parts)
      and _is_file(path)
    }
    if not shown:
      place = Path(self.path).absolute()
      what = f'There are no files in {place}'
      if place.is_file():
        raise ValueError(
          f'{place} is a file. Read it with --source=corpus (in gin: '
          'task/corpus with CORPUS), or set --path (in gin: FOLDER) to a '
          "folder of text files or a pattern such as 'texts/**/*.txt'."
        )
      if not place.exists() and not glob.has_magic(self.path):
        what = f'There is no folder {place}'
      elif found or any(map(Path.is_file, place.rglob('*'))):
        what = f'All files in {place} are hidden by a dot in their paths'
      raise ValueError(
        f'{what}. Set --path (in gin: FOLDER) to a folder of text files or a '
        "pattern such as 'texts/**/*.txt'."
      )
    return shown

  @functools.cached_property
  def _split_of(self) -> dict[str, str]:
    chosen = self._choose_splits()
    names = {}
    for name, split in chosen.items():
      real = os.path.realpath(self._files[name])
      other = names.setdefault(real, name)
      # If test/ is a link to validation/, train is still apart.
      both = {split, chosen[other]}
      if other != name and both != {'validation', 'test'}:
        raise ValueError(
          f'{self._files[other]} and {self._files[name]} are the same file, in '
          f'the splits {chosen[other]} and {split}. Remove one of the links.'
        )
    return chosen

  def _choose_splits(self) -> dict[str, str]:
    if self.split_file:
      return self._read_split_file()
    in_folders = {
      name: Path(name).parts[0]
      for name in self._files
      if Path(name).parts[0] in SPLITS and len(Path(name).parts) > 1
    }
    if in_folders:
      left_out = len(self._files) - len(in_folders)
      if left_out:
        logging.info(
          '%s: left out %d files that are in none of the folders %s.',
          self.path,
          left_out,
          ', '.join(SPLITS),
        )
      return in_folders
    return split_by_name(
      self._files,
      self.path,
      'Put them in train/, validation/ and test/, or set --split_file (in gin: '
      'sources.Folder.split_file).',
    )

  def _read_split_file(self) -> dict[str, str]:
    by_stem = {}
    for name in self._files:
      by_stem.setdefault(Path(name).stem, []).append(name)
    chosen = {}
    lines = read_text(Path(expand_home(self.split_file))).splitlines()
    for number, line in enumerate(lines, 1):
      name, split = (line.split('\t') + [''])[:2]
      names = [name] if name in self._files else by_stem.get(name, [])
      if split not in (*SPLITS, _DROP):
        if not line.strip() or (number == 1 and not names):
          continue
        raise ValueError(
          f'{self.split_file}:{number} gives {name!r} the split {split!r}. '
          f'Write name, tab and one of {", ".join(SPLITS)}, {_DROP}.'
        )
      if len(names) != 1:
        raise ValueError(
          f'{self.split_file}:{number} names {name!r}, which matches '
          f'{len(names)} of the files in {self.path}. Write the path of one '
          'file inside the folder.'
        )
      if names[0] in chosen:
        raise ValueError(
          f'{self.split_file}:{number} lists {names[0]!r} again. Keep one line '
          'per file.'
        )
      chosen[names[0]] = split
    chosen = {name: split for name, split in chosen.items() if split in SPLITS}
    if not chosen:
      raise ValueError(
        f'{self.split_file} assigns no file to a split. '
        f'Write lines of name, tab and one of {", ".join(SPLITS)}.'
      )
    logging.info(
      '%s: %d files, %d of them assigned to a split by %s.',
      self.path,
      len(self._files),
      len(chosen),
      self.split_file,
    )
    return dict(sorted(chosen.items()))


def _files_in(root: Path) -> Iterator[Path]:
  """Yields the files of a folder and its subfolders, also of linked ones."""
  for folder, folders, names in os.walk(root, followlinks=True):
    folders[:] = [name for name in folders if not name.startswith('.')]
    here = Path(os.path.realpath(folder))
    for name in folders:
      if here.is_relative_to(os.path.realpath(os.path.join(folder, name))):
        raise ValueError(
          f'{Path(folder, name)} is a link to a folder that holds it. Remove '
          'the link.'
        )
    yield from (Path(folder, name) for name in names)


def _is_file(path: Path) -> bool:
  """Returns whether a path is a file; ValueError if it is a broken link."""
  if path.is_symlink() and not path.exists():
    raise ValueError(
      f'{path} is a link to {os.readlink(path)}, which does not exist. Restore '
      'that file, or remove the link.'
    )
  return path.is_file()
