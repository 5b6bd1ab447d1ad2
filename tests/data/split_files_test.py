"""The files of a split: what goes in comes out, and damage is named."""

import json

import numpy as np
import pytest

from meliad_rec.data import store
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.vocabulary import Bytes


def stream(texts=('first one', '', 'žluť')):
  for i, text in enumerate(texts):
    ids = Bytes().encode(text)
    yield Document(f'a/{i}.txt', ids, len(ids), len(text.split()))


def damage(folder, facts, kind, content):
  """Writes other content and owns up to it, as a hostile manifest would."""
  file = folder / facts['files'][kind]['name']
  file.write_bytes(content)
  facts['files'][kind] = store.file_facts(file)


def saved(folder, array):
  np.save(folder / 'x.npy', array, allow_pickle=True)
  return (folder / 'x.npy').read_bytes()


def test_documents_come_back_as_they_went_in(tmp_path):
  facts = store.write_split(tmp_path, 'train', stream(), Bytes())
  assert (facts['documents'], facts['tokens']) == (3, 15)
  assert (facts['bytes'], facts['words']) == (15, 3)
  read = store.read_split(tmp_path, facts, Bytes())
  expected = Documents.collect(stream(), Bytes())
  assert isinstance(read.tokens, np.memmap)
  assert read.identity == expected.identity
  assert read.names == expected.names
  for i in range(3):
    np.testing.assert_array_equal(read[i], expected[i])


def test_an_id_outside_the_vocabulary_is_refused(tmp_path):
  for ids in ([0, 5], [5, 259]):
    documents = iter([Document('odd', np.array(ids), 2, 1)])
    with pytest.raises(ValueError, match="'odd' holds an id outside 1 to 258"):
      store.write_split(tmp_path, 'train', documents, Bytes())


def test_labels_are_refused(tmp_path):
  ids = np.array([5, 6])
  documents = iter([Document('odd', ids, 2, 1, labels=ids)])
  with pytest.raises(ValueError, match="'odd' has labels, which a store does"):
    store.write_split(tmp_path, 'train', documents, Bytes())


@pytest.mark.parametrize('texts', [(), ('', '')])
def test_a_split_without_text_is_refused(tmp_path, texts):
  with pytest.raises(ValueError, match="'test' holds no text"):
    store.write_split(tmp_path, 'test', stream(texts), Bytes())


def test_nothing_is_unpickled(tmp_path):
  facts = store.write_split(tmp_path, 'train', stream(), Bytes())
  damage(tmp_path, facts, 'words', saved(tmp_path, np.array([print, 1, 2])))
  with pytest.raises(ValueError, match='train.words.npy is not a NumPy array'):
    store.read_split(tmp_path, facts, Bytes())


@pytest.mark.parametrize(
  'kind, content, told',
  [
    ('tokens', b'x' * 28, 'train.tokens does not hold 15 tokens'),
    ('starts', b'', 'train.starts.npy is not a NumPy array'),
    ('names', b'{', 'train.names.json is not JSON'),
    ('names', json.dumps(['a']).encode(), 'names of 3 documents'),
  ],
)
def test_wrong_files_are_named(tmp_path, kind, content, told):
  facts = store.write_split(tmp_path, 'train', stream(), Bytes())
  damage(tmp_path, facts, kind, content)
  with pytest.raises(ValueError, match=told):
    store.read_split(tmp_path, facts, Bytes())


@pytest.mark.parametrize(
  'starts, told',
  [
    ([0, 9, 15], r'holds int64\[3\], not int64\[4\]'),
    ([0.0, 9.0, 9.0, 15.0], 'holds float64'),
    ([0, 9, 9, 99], 'do not fit the 15 tokens'),
    ([0, 9, 8, 15], 'do not fit the 15 tokens'),
  ],
)
def test_starts_fit_the_tokens(tmp_path, starts, told):
  facts = store.write_split(tmp_path, 'train', stream(), Bytes())
  damage(tmp_path, facts, 'starts', saved(tmp_path, np.array(starts)))
  with pytest.raises(ValueError, match=told):
    store.read_split(tmp_path, facts, Bytes())
