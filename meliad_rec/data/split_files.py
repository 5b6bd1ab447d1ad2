"""The files of one split in a token store: ids, borders, counts and names."""

from collections.abc import Iterable
import json
from pathlib import Path

import numpy as np

from meliad_rec.data import manifest as manifests
from meliad_rec.data.document import check_ids
from meliad_rec.data.document import Document
from meliad_rec.data.document import token_dtype
from meliad_rec.data.documents import Documents
from meliad_rec.data.vocabulary import Vocabulary


def read(folder: Path, facts: dict, vocabulary: Vocabulary) -> Documents:
  """The documents of a split; their ids stay on disk until they are read.

  Raises:
    ValueError: a file is missing, of another size, or not what it should be.
  """
  files = {k: manifests.find(folder, f) for k, f in facts['files'].items()}
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


def write(
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
    'files': {kind: manifests.facts(file) for kind, file in paths.items()},
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
