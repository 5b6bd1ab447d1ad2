"""Projects as documents: articles in LaTeX, and repositories of source code.

The arXiv and GitHub sets of Hutchins et al. 2022 (section 4) were not
published; these are documents of the same kinds.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
import glob
import gzip
import io
from pathlib import Path
from pathlib import PurePosixPath
import re
import tarfile
from typing import NamedTuple
import zipfile

from absl import logging

from meliad_rec.data.documents import SPLITS
from meliad_rec.data.duplicates import sketch
from meliad_rec.data.duplicates import Sketches
from meliad_rec.data.split_files import ARCHIVE_ERRORS
from meliad_rec.data.splits import split_by_name
from meliad_rec.storage.workdir import expand_home

_ARCHIVE = re.compile(r'\.(tar|tgz|zip|gz|tar\.(gz|bz2|xz))$')
_LICENSE_FILE = re.compile(
  r'((un)?licen[cs]e|copying)([-_.].*)?', re.IGNORECASE
)
# Words by which a license is recognized; the earliest in its file counts.
LICENSES = {
  'apache-2.0': 'apache license version 2 0',
  'agpl-3.0': 'gnu affero general public license version 3',
  'bsd': 'redistribution and use in source and binary forms',
  'gpl-2.0': 'gnu general public license version 2',
  'gpl-3.0': 'gnu general public license version 3',
  'isc': 'permission to use copy modify and or distribute this software',
  'lgpl-2.1': 'gnu lesser general public license version 2 1',
  'lgpl-3.0': 'gnu lesser general public license version 3',
  'mit': 'permission is hereby granted free of charge to any person obtaining',
  'mpl-2.0': 'mozilla public license version 2 0',
  'unlicense': 'this is free and unencumbered software released into the',
}


class _Place(NamedTuple):
  """A folder, an archive, or an archive inside an uncompressed .tar."""

  path: Path
  offset: int | None = None
  size: int = 0


@dataclasses.dataclass(frozen=True)
class Projects:
  """Articles or repositories; all chosen files of one make one document.

  A project is a folder, or an archive: .tar, .zip, a compressed .tar, or a .gz
  of a single LaTeX file. Files and folders in it whose names begin with a dot
  are skipped. A .tar that holds only .gz and .pdf files is bulk data
  of arXiv: each .gz in it is a project. The files of a document are sorted by
  path, with a newline between them. A file that is not UTF-8 is read as
  Latin-1, and a file with null bytes is left out.

  A hash of a project's name decides its split: about 90 % are in train, 5 % in
  validation and 5 % in test. A project of train that is similar to one of
  validation or test is left out, and so is a project of validation that is
  similar to one of test.

  Attributes:
    path: a folder of projects, or a pattern that matches projects, such as
      'repositories/*/*'.
    suffixes: suffixes of the files to read.
    licenses: licenses of the projects to read, of LICENSES. They are found by
      the words of the file LICENSE, LICENCE, COPYING or UNLICENSE of a project.
      None: a license is not needed.
    names: a file with the name of a project in each line; no others are read. A
      name is a path inside the folder, without the suffix of an archive. For a
      .gz inside a .tar, it is the name of the .gz without its suffix. None: all
      projects.
    similarity: share of the shingles of two documents, above 0 and at most 1,
      from which they are similar; see duplicates.py. None: nothing is left out.
    fetch: a command that gets the projects, for the error message.

  Raises:
    ValueError: there are no projects or fewer than three, two have one name, an
      archive cannot be read, or an attribute is wrong. Raised on first use.
  """

  path: str
  suffixes: Sequence[str]
  licenses: Sequence[str] | None = None
  names: str | None = None
  similarity: float | None = 0.5
  fetch: str | None = None

  splits = SPLITS

  def __post_init__(self):
    object.__setattr__(self, 'path', expand_home(self.path))
    wrong = [s for s in self.suffixes if not s.startswith('.')]
    if wrong or not self.suffixes or isinstance(self.suffixes, str):
      raise ValueError(
        f'suffixes must be a list such as .py,.c, got {self.suffixes!r}. Set '
        '--suffixes (in gin: SUFFIXES).'
      )
    if self.similarity is not None and not 0 < self.similarity <= 1:
      raise ValueError(
        'similarity must be None, or above 0 and at most 1, got '
        f'{self.similarity}. Set sources.Projects.similarity.'
      )
    unknown = {*(self.licenses or ())} - {*LICENSES}
    if unknown:
      raise ValueError(
        f'The license {min(unknown)!r} is not one of {", ".join(LICENSES)}. '
        'Correct --licenses (in gin: LICENSES).'
      )

  @property
  def description(self) -> str:
    licenses = f', {", ".join(self.licenses)}' if self.licenses else ''
    name = Path(self.path).name
    return f'projects: {name}, {" ".join(self.suffixes)}{licenses}'

  def read(self, split: str) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of the projects of a split, sorted by name."""
    skipped = 0
    others = self._held_out(split)
    for name, text in self._texts(split):
      if others and others.similarity(sketch(text)) >= self.similarity:
        skipped += 1
      else:
        yield name, text
    if skipped:
      logging.info(
        '%s, %s: left out %d projects that are similar to one of %s.',
        self.path,
        split,
        skipped,
        'validation or test' if split == 'train' else 'test',
      )

  def _held_out(self, split: str) -> Sketches | None:
    """Sketches of the splits with which a split must share no documents."""
    if split == 'test' or self.similarity is None:
      return None
    return self._sketches if split == 'train' else self._test_sketches

  @functools.cached_property
  def _test_sketches(self) -> Sketches:
    return Sketches(sketch(text) for _, text in self._texts('test'))

  @functools.cached_property
  def _sketches(self) -> Sketches:
    return Sketches(
      sketch(text)
      for split in ('validation', 'test')
      for _, text in self._texts(split)
    )

  def _texts(self, split: str) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of a split, similar ones included."""
    unlicensed = 0
    for name, its_split in self._split_of.items():
      if its_split != split:
        continue
      files = dict(_files(name, self._places[name]))
      license_ = self.licenses and _license(files, self.suffixes)
      if self.licenses is not None and license_ not in self.licenses:
        unlicensed += 1
        continue
      chosen = (
        _decoded(content)
        for path, content in sorted(files.items())
        if path.endswith(tuple(self.suffixes)) and b'\0' not in content
      )
      if text := '\n'.join(chosen):
        yield name, text
    if unlicensed:
      logging.info(
        '%s, %s: left out %d projects without one of the licenses %s.',
        self.path,
        split,
        unlicensed,
        ', '.join(self.licenses),
      )

  @functools.cached_property
  def _split_of(self) -> dict[str, str]:
    return split_by_name(
      self._places, self.path, 'Give a folder of more projects.'
    )

  @functools.cached_property
  def _places(self) -> dict[str, _Place]:
    """{name of a project: its place}, sorted by name."""
    is_pattern = glob.has_magic(self.path) and not Path(self.path).is_dir()
    root = Path(self.path)
    while is_pattern and not root.is_dir():
      root = root.parent
    paths = map(Path, glob.glob(self.path)) if is_pattern else root.glob('*')
    found = {}
    for path in sorted(paths):
      is_project = path.is_dir() or _ARCHIVE.search(path.name)
      if path.name.startswith('.') or not is_project:
        continue
      inner = _inner(path)
      name = path.relative_to(root).as_posix()
      name = name if path.is_dir() else _ARCHIVE.sub('', name)
      inner = inner or {name: _Place(path)}
      if same := found.keys() & inner:
        name = min(same)
        raise ValueError(
          f'{found[name].path} and {path} both have a project {name!r}. Remove '
          'or rename one of them.'
        )
      found |= inner
    which = ''
    if self.names and found:
      which, listed = f' that {self.names} lists', {*_listed(self.names)}
      found = {name: place for name, place in found.items() if name in listed}
    if not found:
      remedy = f'Run `{self.fetch}`, or set' if self.fetch else 'Set'
      raise ValueError(
        f'There are no folders or archives{which} in '
        f'{Path(self.path).absolute()}, of which each would be one document. '
        f'{remedy} --path (in gin: PROJECTS).'
      )
    return dict(sorted(found.items()))


def _inner(path: Path) -> dict[str, _Place]:
  """Returns {name: place} of the projects in a .tar of arXiv; {} of another."""
  if path.suffix != '.tar' or path.is_dir():
    return {}
  try:
    with tarfile.open(path, 'r:') as archive:
      files = [member for member in archive if member.isfile()]
  except ARCHIVE_ERRORS as error:
    raise _unreadable(path, error) from None
  if not all(file.name.endswith(('.gz', '.pdf')) for file in files):
    return {}
  return {
    _ARCHIVE.sub('', Path(file.name).name): _Place(
      path, file.offset_data, file.size
    )
    for file in files
    if file.name.endswith('.gz')
  }


def _files(name: str, place: _Place) -> Iterator[tuple[str, bytes]]:
  """Yields (path inside the project, content) of all files of a project."""
  try:
    if place.path.is_dir():
      for path in place.path.rglob('*'):
        inside = path.relative_to(place.path).as_posix()
        if _is_shown(inside) and path.is_file() and not path.is_symlink():
          yield inside, path.read_bytes()
      return
    with place.path.open('rb') as file:
      file.seek(place.offset or 0)
      content = file.read(-1 if place.offset is None else place.size)
    if place.path.suffix == '.zip':
      with zipfile.ZipFile(io.BytesIO(content)) as packed:
        for each in packed.infolist():
          if _is_shown(each.filename) and not each.is_dir():
            yield each.filename, packed.read(each)
      return
    if not tarfile.is_tarfile(io.BytesIO(content)):
      # As arXiv packs an article of one file.
      yield f'{name}.tex', gzip.decompress(content)
      return
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
      for member in archive:
        if _is_shown(member.name) and member.isfile():
          yield member.name, archive.extractfile(member).read()
      # tarfile ends quietly at a damaged header; a whole archive, at zeros.
      archive.fileobj.seek(archive.offset)
      if archive.fileobj.read(tarfile.BLOCKSIZE).strip(b'\0'):
        raise tarfile.ReadError('a header is damaged')
  except ARCHIVE_ERRORS as error:
    raise _unreadable(place.path, error) from None


def _is_shown(path: str) -> bool:
  """Returns whether no part of a path inside a project begins with a dot."""
  return not any(part.startswith('.') for part in PurePosixPath(path).parts)


def _license(files: dict[str, bytes], suffixes: Sequence[str]) -> str | None:
  """Returns the license of a project, by a file in its top folder.

  Args:
    files: {path: content}.
    suffixes: suffixes of the text of the project, of which none is a license.
  """
  top = min((path.count('/') for path in files), default=0)
  for path in sorted(files):
    is_named = _LICENSE_FILE.fullmatch(path.rpartition('/')[2])
    is_text = path.endswith(tuple(suffixes))
    if path.count('/') > top or not is_named or is_text:
      continue
    text = re.sub(r'\W+', ' ', _decoded(files[path]).lower())
    begins = {name: text.find(words) for name, words in LICENSES.items()}
    known = [name for name in begins if begins[name] >= 0]
    if known:
      return min(known, key=begins.get)
  return None


def _decoded(content: bytes) -> str:
  try:
    return content.decode()
  except UnicodeDecodeError:
    return content.decode('latin-1')


def _listed(path: str) -> list[str]:
  try:
    lines = Path(expand_home(path)).read_text('utf-8').splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(
      f'The file of names {path} cannot be read ({error}). Set --names (in '
      'gin: NAMES) to a text file with a name in each line.'
    ) from None
  return [name for line in lines if (name := line.strip())]


def _unreadable(path: Path, error: Exception) -> ValueError:
  return ValueError(
    f'The project {path} cannot be read ({error}). Get it again, or remove it.'
  )
