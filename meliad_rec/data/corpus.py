"""Corpora of one stream of text per split: enwik8, text8, WikiText, PTB."""

from collections.abc import Iterator
import dataclasses
import functools
from pathlib import Path
import zipfile

from meliad_rec.data.documents import SPLITS
from meliad_rec.data.split_files import ARCHIVE_ERRORS
from meliad_rec.data.split_files import files_of_splits
from meliad_rec.storage.workdir import expand_home

# Shares of a single file in percent, as the papers on enwik8 and text8 cut it.
_ENDS = {'train': (0, 90), 'validation': (90, 95), 'test': (95, 100)}
# First bytes of files that are not text, although a file is cut by bytes.
_NOT_TEXT = {
  b'\x1f\x8b': 'packed by gzip',
  b'BZh': 'packed by bzip2',
  b'\xfd7zXZ\0': 'packed by xz',
  b'\x28\xb5\x2f\xfd': 'packed by zstd',
  b'7z\xbc\xaf\x27\x1c': 'packed by 7-Zip',
  b'PK\x03\x04': 'packed by zip',
  b'PAR1': 'Parquet',
  b'\xff\xfe': 'UTF-16',
  b'\xfe\xff': 'UTF-16',
}


@dataclasses.dataclass(frozen=True)
class Corpus:
  """One stream of text per split, which is a single document.

  A single file is cut by bytes: the first 90 % are train, the next 5 %
  validation and the last 5 % test. A cut may fall inside a character of several
  bytes. The incomplete character is kept as it is, for which the vocabulary
  must be 'bytes'.

  Attributes:
    path: one file; or a pattern such as 'wiki.{split}.tokens'; split_files.py
      says what {split} means. A file whose name ends in .zip must contain
      exactly one file, which is read.
    newlines: whether to keep newlines. The code of Sukhbaatar et al. 2021 and
      of Fan et al. 2020 drops the newlines of enwik8 (False).
    fetch: a command that gets the files, for the error message.

  Raises:
    ValueError: there is no such file, it cannot be read, it is packed or in
      UTF-16, or a file of a pattern is not UTF-8. Raised on first use.
  """

  path: str
  newlines: bool = True
  fetch: str | None = None

  def __post_init__(self):
    object.__setattr__(self, 'path', expand_home(self.path))

  @property
  def description(self) -> str:
    kept = '' if self.newlines else ', without newlines'
    return f'corpus: {Path(self.path).name}{kept}'

  @property
  def splits(self) -> tuple[str, ...]:
    return tuple(self._files)

  def read(self, split: str) -> Iterator[tuple[str, str]]:
    """Yields (name of the file, text) of the only document of a split."""
    path = self._files[split]
    content = _content(path)
    for begin, kind in _NOT_TEXT.items():
      if content.startswith(begin):
        raise ValueError(
          f'{path} is not text but {kind}. Unpack it, or convert it to UTF-8.'
        )
    if '{split}' in self.path:
      text = _decoded(path, content)
    else:
      begin, end = (len(content) * share // 100 for share in _ENDS[split])
      text = content[begin:end].decode(errors='surrogateescape')
    yield path.name, text if self.newlines else text.replace('\n', '')

  @functools.cached_property
  def _files(self) -> dict[str, Path]:
    """{split: its file}."""
    path = Path(self.path)
    if '{split}' in self.path:
      fetch = self.fetch and f'Run `{self.fetch}`.'
      found = files_of_splits((self.path,), fetch, '--path (in gin: CORPUS)')
      return {split: file for split, (file,) in found.items()}
    if not path.is_file():
      remedy = f'Run `{self.fetch}`, or set' if self.fetch else 'Set'
      raise ValueError(
        f'There is no file {path.absolute()}, whose bytes are cut into train, '
        f'validation and test. {remedy} --path (in gin: CORPUS).'
      )
    return dict.fromkeys(SPLITS, path)


def _content(path: Path) -> bytes:
  try:
    if path.suffix != '.zip':
      return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
      names = [
        each.filename for each in archive.infolist() if not each.is_dir()
      ]
      if len(names) != 1:
        raise ValueError(
          f'{path} contains {len(names)} files. Unpack it, and give the path '
          'of one of them.'
        )
      return archive.read(names[0])
  except ARCHIVE_ERRORS as error:
    raise ValueError(
      f'{path} cannot be read ({error}). Get it again.'
    ) from None


def _decoded(path: Path, content: bytes) -> str:
  try:
    return content.decode()
  except UnicodeDecodeError as error:
    raise ValueError(
      f'{path} is not UTF-8 (byte {error.start}). Convert it.'
    ) from None
