"""A token store: documents tokenised once, memory-mapped ever after.

A folder with manifest.json, the SentencePiece model if there is one, and for
each split its ids (raw, little-endian), starts, bytes and words (.npy) and
names (JSON).

The manifest of a token store: what its folder holds, checked as it is read.

Nothing is ever unpickled, and no name in a manifest can lead out of its folder.

The files of one split in a token store: ids, borders, counts and names.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import hashlib
import json
import os
from pathlib import Path
import shutil
import tempfile

import numpy as np

from meliad_rec.data.documents import check_ids
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.documents import token_dtype
from meliad_rec.data.vocabulary import open_vocabulary
from meliad_rec.data.vocabulary import SentencePiece
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.storage.workdir import local

FORMAT = 1
NAME = 'manifest.json'

_FILE = {'name': str, 'size': int, 'sha256': str}
_SPLIT = {
  'documents': int,
  'tokens': int,
  'bytes': int,
  'words': int,
  'files': dict.fromkeys(
    ('tokens', 'starts', 'bytes', 'words', 'names'), _FILE
  ),
}
_MANIFEST = {
  'format': int,
  'source': str,
  'dtype': str,
  'vocabulary': {'identity': str, 'size': int, 'files': {'*': _FILE}},
  'splits': {'*': _SPLIT},
}


def read_manifest(folder: Path) -> dict:
  """The manifest of a folder, whole and of the format this version reads.

  Raises:
    ValueError: there is none, or it is not what `write` makes.
  """
  path = folder / NAME
  try:
    manifest = json.loads(path.read_bytes())
  except OSError as error:
    raise ValueError(
      f'{folder} is not a token store: {NAME} cannot be read '
      f'({error.strerror}); make one with python -m meliad_rec tokenize.'
    ) from None
  except ValueError:
    raise ValueError(f'{path} is not JSON; write the store again.') from None
  if not _fits(manifest, _MANIFEST) or manifest['format'] != FORMAT:
    raise ValueError(
      f'{path} is not a manifest of store format {FORMAT}, the one this '
      'version reads; write the store again.'
    )
  return manifest


def write_manifest(folder: Path, manifest: dict) -> None:
  """Writes a manifest, beside files that are all there already."""
  assert _fits(manifest, _MANIFEST)
  (folder / NAME).write_text(json.dumps(manifest, indent=1) + '\n')


def file_facts(path: Path) -> dict:
  """What a manifest says of a file: name, size in bytes, sha256."""
  return {
    'name': path.name,
    'size': path.stat().st_size,
    'sha256': sha256(path),
  }


def find(folder: Path, file: dict) -> Path:
  """The path of a file of the manifest, which is there with its full size.

  Raises:
    ValueError: it is outside the folder, missing, or of another size.
  """
  name, path = file['name'], folder / file['name']
  inside = path.resolve().parent == folder.resolve()
  if not inside or Path(name).name != name:
    raise ValueError(
      f'The manifest of {folder} names the file {name!r}, which is not in that '
      'folder; write the store again.'
    )
  if not path.is_file():
    raise ValueError(f'{path} is missing; write the store again.')
  size = path.stat().st_size
  if size != file['size']:
    raise ValueError(
      f'{path} has {size} bytes, but {file["size"]} were written; '
      'write the store again.'
    )
  return path


def sha256(path: Path) -> str:
  """The sha256 of a file, in hexadecimal."""
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _fits(value: object, shape: type | dict) -> bool:
  if isinstance(shape, type):
    return type(value) is shape
  if not isinstance(value, dict):
    return False
  if '*' in shape:
    return all(_fits(item, shape['*']) for item in value.values())
  return value.keys() == shape.keys() and all(
    _fits(value[key], shape[key]) for key in shape
  )


def read_split(folder: Path, facts: dict, vocabulary: Vocabulary) -> Documents:
  """The documents of a split; their ids stay on disk until they are read.

  Raises:
    ValueError: a file is missing, of another size, or not what it should be.
  """
  files = {k: find(folder, f) for k, f in facts['files'].items()}
  dtype = token_dtype(vocabulary.size)
  if files['tokens'].stat().st_size != facts['tokens'] * dtype.itemsize:
    raise ValueError(
      f'{files["tokens"]} does not hold {facts["tokens"]} tokens of '
      f'{dtype.itemsize} bytes; write the store again.'
    )
  documents = Documents(
    tokens=np.memmap(files['tokens'], dtype, mode='r'),
    starts=_read_array(files['starts'], facts['documents'] + 1),
    bytes_=_read_array(files['bytes'], facts['documents']),
    words=_read_array(files['words'], facts['documents']),
    names=_read_names(files['names'], facts['documents']),
    tokens_sha256=facts['files']['tokens']['sha256'],
  )
  ends = documents.starts[[0, -1]].tolist()
  if ends != [0, facts['tokens']] or (documents.lengths < 0).any():
    raise ValueError(
      f'The starts in {files["starts"]} do not fit the {facts["tokens"]} '
      'tokens beside it; write the store again.'
    )
  return documents


def write_split(
  folder: Path,
  split: str,
  documents: Iterable[Document],
  vocabulary: Vocabulary,
) -> dict:
  """Writes the files of a split, one document at a time; what they hold.

  Raises:
    ValueError: the split is empty, or an id is 0 or outside the vocabulary.
  """
  dtype = token_dtype(vocabulary.size)
  lengths, bytes_, words, names = [0], [], [], []
  tokens = folder / f'{split}.tokens'
  with tokens.open('wb') as file:
    for document in documents:
      ids = document.tokens
      check_ids(document, vocabulary)
      if document.labels is not None:
        raise ValueError(
          f'The document {document.name!r} has labels, which a store does not '
          'keep; train on its task itself.'
        )
      file.write(ids.astype(dtype).tobytes())
      lengths.append(len(ids))
      bytes_.append(document.bytes_)
      words.append(document.words)
      names.append(document.name)
  if not sum(lengths):
    raise ValueError(
      f'The split {split!r} holds no text; leave it out of --splits or add '
      'documents.'
    )
  paths = {'tokens': tokens}
  arrays = {
    'starts': np.cumsum(lengths, dtype=np.int64),
    'bytes': np.asarray(bytes_, np.int64),
    'words': np.asarray(words, np.int64),
  }
  for kind, array in arrays.items():
    paths[kind] = folder / f'{split}.{kind}.npy'
    np.save(paths[kind], array, allow_pickle=False)
  paths['names'] = folder / f'{split}.names.json'
  paths['names'].write_text(json.dumps(names))
  return {
    'documents': len(names),
    'tokens': sum(lengths),
    'bytes': sum(bytes_),
    'words': sum(words),
    'files': {kind: file_facts(file) for kind, file in paths.items()},
  }


def _read_array(path: Path, length: int) -> np.ndarray:
  try:
    array = np.load(path, allow_pickle=False)
  except (ValueError, EOFError, OSError):
    raise ValueError(
      f'{path} is not a NumPy array file; write the store again.'
    ) from None
  if array.shape != (length,) or array.dtype != np.int64:
    raise ValueError(
      f'{path} holds {array.dtype}{list(array.shape)}, not int64[{length}]; '
      'write the store again.'
    )
  return array


def _read_names(path: Path, length: int) -> list[str]:
  try:
    names = json.loads(path.read_bytes())
  except ValueError:
    raise ValueError(f'{path} is not JSON; write the store again.') from None
  if not isinstance(names, list) or len(names) != length:
    raise ValueError(
      f'{path} does not hold the names of {length} documents; '
      'write the store again.'
    )
  return names


_MODEL = 'vocabulary.model'


class Store:
  """The splits of a store that `write` made; opening reads no tokens.

  Attributes:
    path: the folder.
    vocabulary: what the ids mean.
    manifest: what manifest.json holds: source, counts, sizes, sha256 sums.

  Raises:
    ValueError: a file is missing, of another size, or not what it should be.
  """

  def __init__(self, path: str | Path):
    self.path = local(path, 'A token store')
    self.manifest = read_manifest(self.path)
    facts = self.manifest['vocabulary']
    models = [find(self.path, f) for f in facts['files'].values()]
    self.vocabulary: Vocabulary = open_vocabulary(*models or ['bytes'])
    if self.vocabulary.identity != facts['identity']:
      raise ValueError(
        f'The vocabulary in the store {self.path} is '
        f'{self.vocabulary.identity}, but its manifest names '
        f'{facts["identity"]}; write the store again.'
      )

  @property
  def splits(self) -> list[str]:
    return list(self.manifest['splits'])

  def documents(self, split: str) -> Documents:
    """The documents of a split; their ids stay on disk until they are read."""
    if split not in self.splits:
      raise ValueError(
        f'The store {self.path} has no split {split!r}; '
        f'it has {", ".join(self.splits)}.'
      )
    facts = self.manifest['splits'][split]
    return read_split(self.path, facts, self.vocabulary)


def write(
  path: str | Path,
  splits: Mapping[str, Iterable[Document]],
  vocabulary: Vocabulary,
  source: str,
  force: bool = False,
) -> Store:
  """Writes a store, whole or not at all, holding one document at a time.

  Args:
    path: the folder to make.
    splits: the documents of each split, read one split after the other.
    vocabulary: what their ids mean; a SentencePiece model is copied.
    source: where the documents come from, in words, for the manifest.
    force: replace the store that is there.

  Raises:
    ValueError: path exists (or is no store, with force), a split is empty, or
      an id is 0 or outside the vocabulary.
  """
  # What is replaced is the folder itself, not a link to it.
  path = local(path, 'A token store').resolve()
  check_free(path, force)
  path.parent.mkdir(parents=True, exist_ok=True)
  # Beside its final place, so that one rename makes it appear.
  folder = Path(tempfile.mkdtemp(prefix=f'.{path.name}.', dir=path.parent))
  try:
    files = {}
    if isinstance(vocabulary, SentencePiece):
      (folder / _MODEL).write_bytes(vocabulary.model)
      files['model'] = file_facts(folder / _MODEL)
    dtype = token_dtype(vocabulary.size)
    manifest = {
      'format': FORMAT,
      'source': source,
      'dtype': dtype.str,
      'vocabulary': {
        'identity': vocabulary.identity,
        'size': vocabulary.size,
        'files': files,
      },
      'splits': {
        split: write_split(folder, split, documents, vocabulary)
        for split, documents in splits.items()
      },
    }
    write_manifest(folder, manifest)
    folder.chmod(0o777 & ~_umask())
    if path.exists():
      check_free(path, force)
      shutil.rmtree(path)
    os.rename(folder, path)
  finally:
    shutil.rmtree(folder, ignore_errors=True)
  return Store(path)


def verify(path: str | Path) -> None:
  """Reads every file of a store and compares its sha256 with the manifest.

  Raises:
    ValueError: names the first file that is not what was written.
  """
  store = Store(path)
  for facts in store.manifest['splits'].values():
    for file in facts['files'].values():
      whole = find(store.path, file)
      if sha256(whole) != file['sha256']:
        raise ValueError(
          f'The contents of {whole} changed since the store was written '
          '(sha256 differs); write the store again.'
        )


def _umask() -> int:
  mask = os.umask(0)
  os.umask(mask)
  return mask


def check_free(path: str | Path, force: bool) -> None:
  """Refuses to write where something is that may not be replaced.

  Raises:
    ValueError: path is a store, without force, or anything else, or no path.
  """
  path = local(path, 'A token store')
  if not path.exists() or (path.is_dir() and not any(path.iterdir())):
    return
  try:
    read_manifest(path)
  except ValueError:
    raise ValueError(
      f'{path} exists and is not a token store; choose another folder.'
    ) from None
  if not force:
    raise ValueError(
      f'The store {path} exists; choose another folder or replace it with '
      '--force.'
    )
