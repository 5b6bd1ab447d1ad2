"""A token store: documents tokenized once and memory-mapped afterwards.

A store is a folder with manifest.json, the file of its vocabulary (none for
bytes), and for each split the token ids (raw, little-endian), the start, number
of bytes and number of words of each document (.npy), and the names (JSON). The
manifest has the size and sha256 of every other file. Nothing is ever unpickled,
and no file name in a manifest can point outside the folder.

Opening a split checks the sha256 of its files, and that all ids are in the
vocabulary. Of more than 16 MiB of ids, only a sample is read. `verify` reads
and checks everything.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import errno
import hashlib
import json
import os
from pathlib import Path
import shutil
import tempfile

import numpy as np

from meliad_rec.data.documents import check_ids
from meliad_rec.data.documents import check_range
from meliad_rec.data.documents import check_split
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.documents import token_dtype
from meliad_rec.data.vocabulary import open_vocabulary
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.data.vocabulary import vocabulary_files
from meliad_rec.storage.workdir import local

FORMAT = 1
MANIFEST = 'manifest.json'
# Opening a split reads all of its ids if they have at most this many bytes, and
# otherwise only a sample of pages.
_WHOLE = 1 << 24
_PAGES, _PAGE = 64, 1 << 13  # Number of pages, and ids of each.
# Errors of writing to a disk without space, which name no file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors of reading a file that is not JSON, or is nested too deeply.
_JSON_ERRORS = (ValueError, RecursionError)

# The keys of a manifest and the types of their values; '*' is any key, and '?'
# marks one that may be missing. `pages` is the sha256 of the sample of pages.
_FILE = {'name': str, 'size': int, 'sha256': str}
_SPLIT = {
  'documents': int,
  'tokens': int,
  'bytes': int,
  'words': int,
  'files': {
    **dict.fromkeys(('starts', 'bytes', 'words', 'names'), _FILE),
    'tokens': _FILE | {'pages?': str},
  },
}
_MANIFEST = {
  'format': int,
  'source': str,
  'dtype': str,
  'vocabulary': {'identity': str, 'size': int, 'files': {'*': _FILE}},
  'splits': {'*': _SPLIT},
}


class Store:
  """An opened store; its tokens are read only when they are used.

  Attributes:
    path: the folder of the store.
    vocabulary: the vocabulary of the ids.
    manifest: the content of manifest.json: source, counts, sizes, sha256 sums.

  Raises:
    ValueError: manifest.json or the file of the vocabulary is missing or
      invalid, or path is a remote address.
  """

  def __init__(self, path: str | Path):
    self.path = local(path, 'A token store')
    self._documents = {}
    self.manifest = read_manifest(self.path)
    entry = self.manifest['vocabulary']
    models = [find_file(self.path, file) for file in entry['files'].values()]
    self.vocabulary: Vocabulary = open_vocabulary(*models or ['bytes'])
    if self.vocabulary.identity != entry['identity']:
      raise ValueError(
        f'The vocabulary in the store {self.path} is '
        f'{self.vocabulary.identity}, but its manifest names '
        f'{entry["identity"]}. Write the store again.'
      )

  @property
  def description(self) -> str:
    return self.manifest['source']

  @property
  def splits(self) -> list[str]:
    """Names of the splits."""
    return list(self.manifest['splits'])

  def documents(self, split: str) -> Documents:
    """Returns the documents of a split; their tokens are memory-mapped.

    Raises:
      ValueError: there is no such split, or its files are missing or damaged.
    """
    check_split(split, self.splits, f'The store {self.path}')
    if split not in self._documents:
      entry = self.manifest['splits'][split]
      self._documents[split] = read_split(self.path, entry, self.vocabulary)
    return self._documents[split]


def write(
  path: str | Path,
  splits: Mapping[str, Iterable[Document]],
  vocabulary: Vocabulary,
  source: str,
  force: bool = False,
) -> Store:
  """Writes a store and opens it. Documents are read one at a time.

  If a document cannot be read or written, no store is created, and an existing
  store is left intact.

  Args:
    path: the folder to create. It may exist if it is empty.
    splits: the documents of each split; splits are read one after the other.
    vocabulary: the vocabulary of the ids; its file is copied to the store.
    source: description of the source, for the manifest.
    force: whether to replace an existing store.

  Raises:
    ValueError: `path` is not free (see `check_free`), a split is empty, a
      document has labels, or an id is 0 or outside the vocabulary.
  """
  # Resolved, so that a link is followed and the folder itself is replaced.
  path = local(path, 'A token store').resolve()
  check_free(path, force)
  path.parent.mkdir(parents=True, exist_ok=True)
  # In the same parent, so that a single rename makes the store appear.
  folder = Path(tempfile.mkdtemp(prefix=f'.{path.name}.', dir=path.parent))
  try:
    files = {}
    for name, content in vocabulary_files(vocabulary).items():
      (folder / name).write_bytes(content)
      files['model'] = file_entry(folder / name)
    manifest = {
      'format': FORMAT,
      'source': source,
      'dtype': token_dtype(vocabulary.size).str,
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
    check_free(path, force)
    _swap(folder, path)
  except OSError as error:
    if error.errno in _FULL:
      error.filename = str(path)
    raise
  finally:
    shutil.rmtree(folder, ignore_errors=True)
  return Store(path)


def _swap(folder: Path, path: Path) -> None:
  """Renames `folder` to `path`, replacing a store that may be at `path`.

  `path` never holds a partly deleted store, even if the process is killed.
  """
  if not path.exists():
    os.rename(folder, path)
    return
  old = folder.with_name(f'{folder.name}.old')
  os.rename(path, old)
  try:
    os.rename(folder, path)
  except BaseException:
    os.rename(old, path)
    raise
  shutil.rmtree(old)


def verify(path: str | Path) -> None:
  """Reads every file of a store and compares its sha256 with the manifest.

  Raises:
    ValueError: a file is missing or changed, or has an id that is not in the
      vocabulary. The message names the first such file.
  """
  store = Store(path)
  for split, entry in store.manifest['splits'].items():
    for file in entry['files'].values():
      file_path = find_file(store.path, file)
      _check_sum(file_path, _sha256(file_path), file['sha256'])
    ids = store.documents(split).tokens
    for begin in range(0, len(ids), _WHOLE):
      part = ids[begin : begin + _WHOLE]
      check_range(part, store.vocabulary.size, ids.filename)


def check_free(path: str | Path, force: bool) -> None:
  """Checks that a store may be written to a path.

  Raises:
    ValueError: path is an existing store and force is False, path is a file or
      a folder that is neither empty nor a store, path is a store in which there
      are other files, or path is a remote address such as gs://bucket/store.
  """
  path = local(path, 'A token store')
  if not path.exists() or (path.is_dir() and not any(path.iterdir())):
    return
  try:
    manifest = read_manifest(path)
  except ValueError:
    raise ValueError(
      f'{path} exists and is not a token store. Choose another folder.'
    ) from None
  if others := {each.name for each in path.iterdir()} - _names(manifest):
    raise ValueError(
      f'{path} holds {min(others)!r}, which is not part of the token store '
      'there. Move it elsewhere, or choose another folder.'
    )
  if not force:
    raise ValueError(
      f'The store {path} exists. Choose another folder, or replace it with '
      '--force.'
    )


def read_split(folder: Path, entry: dict, vocabulary: Vocabulary) -> Documents:
  """Opens the documents of a split; their tokens are memory-mapped.

  Args:
    folder: the folder of the store.
    entry: the split's part of the manifest.
    vocabulary: the vocabulary of the ids.

  Raises:
    ValueError: a file is missing, has changed or has invalid content.
  """
  files = {k: find_file(folder, f) for k, f in entry['files'].items()}
  dtype = token_dtype(vocabulary.size)
  size = files['tokens'].stat().st_size
  if not 0 < size == entry['tokens'] * dtype.itemsize:
    raise ValueError(
      f'{files["tokens"]} does not hold {entry["tokens"]} tokens of '
      f'{dtype.itemsize} bytes. Write the store again.'
    )
  tokens = np.memmap(files['tokens'], dtype, mode='r')
  checked, file = _sample(tokens), entry['files']['tokens']
  is_whole = len(checked) == len(tokens)
  # Stores of version 0.1.0 have no sha256 of the sample.
  if needed := file['sha256'] if is_whole else file.get('pages'):
    _check_sum(files['tokens'], hashlib.sha256(checked).hexdigest(), needed)
  check_range(checked, vocabulary.size, files['tokens'])
  for kind in ('starts', 'bytes', 'words', 'names'):
    needed = entry['files'][kind]['sha256']
    _check_sum(files[kind], _sha256(files[kind]), needed)
  documents = Documents(
    tokens=tokens,
    starts=_read_array(files['starts'], entry['documents'] + 1),
    bytes_=_read_array(files['bytes'], entry['documents']),
    words=_read_array(files['words'], entry['documents']),
    names=_read_names(files['names'], entry['documents']),
    tokens_sha256=file['sha256'],
    vocabulary_size=vocabulary.size,
  )
  ends = documents.starts[[0, -1]].tolist()
  if ends != [0, entry['tokens']] or (documents.lengths < 0).any():
    raise ValueError(
      f'The document starts in {files["starts"]} do not match the '
      f'{entry["tokens"]} tokens of the split. Write the store again.'
    )
  for kind, counts in ('bytes', documents.bytes_), ('words', documents.words):
    if counts.sum() != entry[kind] or counts.min() < 0:
      raise ValueError(
        f'The {kind} of the documents in {files[kind]} do not add up to the '
        f'{entry[kind]} of the split. Write the store again.'
      )
  return documents


def write_split(
  folder: Path,
  split: str,
  documents: Iterable[Document],
  vocabulary: Vocabulary,
) -> dict:
  """Writes the files of a split; returns the split's part of the manifest.

  Raises:
    ValueError: the split is empty, a document has labels or a source and a
      target, or an id is 0 or outside the vocabulary.
  """
  dtype = token_dtype(vocabulary.size)
  lengths, bytes_, words, names = [0], [], [], []
  tokens = folder / f'{split}.tokens'
  with tokens.open('wb') as file:
    for document in documents:
      check_ids(document, vocabulary)
      for part in 'labels', 'first_length':
        if getattr(document, part) is not None:
          kind = 'labels' if part == 'labels' else 'a source and a target'
          raise ValueError(
            f'Document {document.name!r} has {kind}, which a store cannot '
            'hold. Train on its task directly.'
          )
      file.write(document.tokens.astype(dtype).tobytes())
      lengths.append(len(document.tokens))
      bytes_.append(document.bytes_)
      words.append(document.words)
      names.append(document.name)
  if not sum(lengths):
    raise ValueError(
      f'The split {split!r} has no text. Leave it out of --splits, or add '
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
  files = {kind: file_entry(path) for kind, path in paths.items()}
  ids = np.memmap(tokens, dtype, mode='r')
  if len(pages := _sample(ids)) < len(ids):
    files['tokens']['pages'] = hashlib.sha256(pages).hexdigest()
  return {
    'documents': len(names),
    'tokens': sum(lengths),
    'bytes': sum(bytes_),
    'words': sum(words),
    'files': files,
  }


def _sample(ids: np.ndarray) -> np.ndarray:
  """Returns ids, or _PAGES evenly spaced parts of them if over _WHOLE bytes."""
  if ids.nbytes <= _WHOLE:
    return ids
  begins = np.arange(_PAGES) * (len(ids) - _PAGE) // (_PAGES - 1)
  return np.concatenate([ids[begin : begin + _PAGE] for begin in begins])


def _check_sum(path: Path, found: str, needed: str) -> None:
  if found != needed:
    raise ValueError(
      f'The content of {path} changed since the store was written (sha256 '
      'differs). Write the store again.'
    )


def _read_array(path: Path, length: int) -> np.ndarray:
  # Mapped, so that no memory is allocated for entries that are not there. The
  # header is a Python expression, and NumPy raises whatever its parser does.
  try:
    array = np.lib.format.open_memmap(path, 'r')
  except Exception:
    raise ValueError(
      f'{path} is not a NumPy array file. Write the store again.'
    ) from None
  if array.shape != (length,) or array.dtype != np.int64:
    raise ValueError(
      f'{path} holds {array.dtype}{list(array.shape)}, not int64[{length}]. '
      'Write the store again.'
    )
  return np.array(array)


def _read_names(path: Path, length: int) -> list[str]:
  try:
    names = json.loads(path.read_bytes())
  except _JSON_ERRORS:
    raise ValueError(f'{path} is not JSON. Write the store again.') from None
  right = isinstance(names, list) and {*map(type, names)} <= {str}
  if not right or len(names) != length:
    raise ValueError(
      f'{path} does not hold the names of {length} documents. '
      'Write the store again.'
    )
  return names


def read_manifest(folder: Path) -> dict:
  """Reads and checks the manifest of a folder.

  Raises:
    ValueError: there is no manifest, it is damaged, or it has another store
      format.
  """
  path = folder / MANIFEST
  try:
    manifest = json.loads(path.read_bytes())
  except OSError as error:
    raise ValueError(
      f'{folder.absolute()} is not a token store: {MANIFEST} cannot be read '
      f'({error.strerror}). Make one with meliad-rec tokenize.'
    ) from None
  except _JSON_ERRORS:
    raise ValueError(f'{path} is not JSON. Write the store again.') from None
  if not _matches(manifest, _MANIFEST) or manifest['format'] != FORMAT:
    raise ValueError(
      f'{path} is not a manifest of store format {FORMAT}, which this version '
      'reads. Write the store again.'
    )
  return manifest


def write_manifest(folder: Path, manifest: dict) -> None:
  """Writes a manifest; all files that it lists must be in the folder."""
  assert _matches(manifest, _MANIFEST)
  (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + '\n')


def file_entry(path: Path) -> dict:
  """Returns the manifest entry of a file: its name, size in bytes, sha256."""
  return {
    'name': path.name,
    'size': path.stat().st_size,
    'sha256': _sha256(path),
  }


def find_file(folder: Path, entry: dict) -> Path:
  """Returns the path of a file in the manifest after checking its size.

  Raises:
    ValueError: the file is outside the folder, missing, or has another size.
  """
  name, path = entry['name'], folder / entry['name']
  is_inside = path.resolve().parent == folder.resolve()
  if not is_inside or Path(name).name != name:
    raise ValueError(
      f'The manifest of {folder} names the file {name!r}, which is not '
      'directly in that folder. Write the store again.'
    )
  if not path.is_file():
    raise ValueError(f'{path} is missing. Write the store again.')
  size = path.stat().st_size
  if size != entry['size']:
    raise ValueError(
      f'{path} has {size} bytes, but {entry["size"]} were written. '
      'Write the store again.'
    )
  return path


def _names(manifest: dict) -> set[str]:
  """Returns the names of all files of the store with this manifest."""
  entries = [*manifest['vocabulary']['files'].values()]
  for split in manifest['splits'].values():
    entries += split['files'].values()
  return {MANIFEST, *(entry['name'] for entry in entries)}


def _matches(value: object, shape: type | dict) -> bool:
  if isinstance(shape, type):
    return type(value) is shape
  if not isinstance(value, dict):
    return False
  if '*' in shape:
    return all(_matches(item, shape['*']) for item in value.values())
  known = {key.removesuffix('?'): inner for key, inner in shape.items()}
  needed = {key for key in shape if key in known}
  return needed <= value.keys() <= known.keys() and all(
    _matches(item, known[key]) for key, item in value.items()
  )


def _sha256(path: Path) -> str:
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _umask() -> int:
  mask = os.umask(0)
  os.umask(mask)
  return mask
