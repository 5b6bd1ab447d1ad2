"""A token store: documents tokenised once, memory-mapped ever after.

A folder with manifest.json, the SentencePiece model if there is one, and for
each split its ids (raw, little-endian), starts, bytes and words (.npy) and
names (JSON).
"""

from collections.abc import Iterable
from collections.abc import Mapping
import os
from pathlib import Path
import shutil
import tempfile

from meliad_rec.data import manifest as manifests
from meliad_rec.data import split_files
from meliad_rec.data.document import Document
from meliad_rec.data.document import token_dtype
from meliad_rec.data.documents import Documents
from meliad_rec.data.vocabulary import open_vocabulary
from meliad_rec.data.vocabulary import SentencePiece
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.local_path import local

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
    self.manifest = manifests.read(self.path)
    facts = self.manifest['vocabulary']
    models = [manifests.find(self.path, f) for f in facts['files'].values()]
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
    return split_files.read(self.path, facts, self.vocabulary)


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
      files['model'] = manifests.facts(folder / _MODEL)
    dtype = token_dtype(vocabulary.size)
    manifest = {
      'format': manifests.FORMAT,
      'source': source,
      'dtype': dtype.str,
      'vocabulary': {
        'identity': vocabulary.identity,
        'size': vocabulary.size,
        'files': files,
      },
      'splits': {
        split: split_files.write(folder, split, documents, vocabulary)
        for split, documents in splits.items()
      },
    }
    manifests.write(folder, manifest)
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
      whole = manifests.find(store.path, file)
      if manifests.sha256(whole) != file['sha256']:
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
    manifests.read(path)
  except ValueError:
    raise ValueError(
      f'{path} exists and is not a token store; choose another folder.'
    ) from None
  if not force:
    raise ValueError(
      f'The store {path} exists; choose another folder or replace it with '
      '--force.'
    )
