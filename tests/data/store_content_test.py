"""Stores whose content changed at equal sizes, or claims what is not there."""

import hashlib
import json

import numpy as np
import pytest

from meliad_rec.data import store
from meliad_rec.data.documents import Document
from meliad_rec.data.lanes import Lanes
from meliad_rec.data.store import Store
from meliad_rec.data.vocabulary import Bytes
from tests import tiny_run


@pytest.fixture
def folder(tmp_path):
  tiny_run.write_store(tmp_path / 'store')
  return tmp_path / 'store'


@pytest.fixture
def sampled(monkeypatch):
  """Every file of ids counts as a large one, of which 3 pages are read."""
  monkeypatch.setattr(store, '_WHOLE', 20)
  monkeypatch.setattr(store, '_PAGES', 3)
  monkeypatch.setattr(store, '_PAGE', 5)


def flip(path, place=-1):
  content = bytearray(path.read_bytes())
  content[place] ^= 1
  path.write_bytes(content)


def open_train(folder):
  return Store(folder).documents('train')


@pytest.mark.parametrize(
  'name', ['bytes.npy', 'words.npy', 'starts.npy', 'names.json', 'tokens']
)
def test_one_changed_bit_is_noticed_at_opening(folder, name):
  flip(folder / f'train.{name}', -2)
  with pytest.raises(ValueError, match=f'train.{name} changed since'):
    open_train(folder)
  assert len(Store(folder).documents('test')) == 1


def test_other_ids_are_noticed_in_a_sample(sampled, folder):
  path = folder / 'train.tokens'
  good = np.fromfile(path, '<u2')
  assert len(open_train(folder)) == 9
  np.roll(good, 1).tofile(path)
  with pytest.raises(ValueError, match='train.tokens changed since'):
    open_train(folder)
  other = good.copy()
  other[9] = 90  # In no page, so that only `verify` finds it.
  other.tofile(path)
  assert open_train(folder).tokens[9] == 90
  with pytest.raises(ValueError, match='train.tokens changed since'):
    store.verify(folder)


def test_the_sample_of_large_files_stays():
  """Golden: with another sample, no large store would open any more."""
  ids = (np.arange(10_000_000) % 65535 + 1).astype('<u2')
  found = hashlib.sha256(store._sample(ids)).hexdigest()
  assert found.startswith('dff03a9c0444')


def test_stores_without_a_sum_of_the_sample_still_open(sampled, folder):
  manifest = json.loads((folder / 'manifest.json').read_bytes())
  for entry in manifest['splits'].values():
    assert len(entry['files']['tokens'].pop('pages')) == 64
  store.write_manifest(folder, manifest)
  assert len(open_train(folder)) == 9
  store.verify(folder)


def with_ids(folder, split, ids):
  """Puts ids into a store, whose manifest agrees with them."""
  manifest = json.loads((folder / 'manifest.json').read_bytes())
  path = folder / f'{split}.tokens'
  np.asarray(ids, '<u2').tofile(path)
  manifest['splits'][split]['files']['tokens'] = store.file_entry(path)
  store.write_manifest(folder, manifest)


@pytest.mark.parametrize('wrong', [0, 259, 2**16 - 1])
def test_ids_outside_the_vocabulary_are_refused(folder, wrong, monkeypatch):
  ids = np.fromfile(folder / 'test.tokens', '<u2')
  ids[9] = wrong
  with_ids(folder, 'test', ids)
  told = rf'test.tokens has the id {wrong}, .* 1 to 258'
  with pytest.raises(ValueError, match=told):
    Store(folder).documents('test')
  # Outside of the sample of a large file, they are found as they are read.
  for name, value in ('_WHOLE', 20), ('_PAGES', 3), ('_PAGE', 5):
    monkeypatch.setattr(store, name, value)
  documents = Store(folder).documents('test')
  with pytest.raises(ValueError, match=told):
    next(Lanes(documents, 1, 30, seed=0))
  for read in lambda: documents[0], lambda: documents.head(1, 12, Bytes()):
    with pytest.raises(ValueError, match=told):
      read()
  with pytest.raises(ValueError, match=told):
    store.verify(folder)


def test_counts_must_add_up(tmp_path):
  document = Document('a', np.array([5, 6]), 2, 1)
  entry = store.write_split(tmp_path, 'train', [document], Bytes())
  for kind in 'bytes', 'words':
    with pytest.raises(
      ValueError, match=f'{kind} of .*train.{kind}.npy do not'
    ):
      store.read_split(tmp_path, entry | {kind: 7}, Bytes())


def claiming(entries):
  """An array file of no content that claims some entries."""
  shape = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({entries},)}}"
  header = f'{shape:<117}\n'.encode()
  return b'\x93NUMPY\1\0' + len(header).to_bytes(2, 'little') + header


@pytest.mark.parametrize(
  'name, content, told',
  [
    ('starts.npy', claiming(10**13), 'not a NumPy array file'),
    ('bytes.npy', claiming('(' * 50), 'not a NumPy array file'),
    ('names.json', b'[' * 10**5, 'not JSON'),
    ('names.json', b'[1, 2, 3, 4, 5, 6, 7, 8, 9]', 'the names of 9'),
  ],
)
def test_files_that_claim_too_much_are_refused(folder, name, content, told):
  path = folder / f'train.{name}'
  path.write_bytes(content)
  manifest = json.loads((folder / 'manifest.json').read_bytes())
  kind = name.partition('.')[0]
  manifest['splits']['train']['files'][kind] = store.file_entry(path)
  store.write_manifest(folder, manifest)
  with pytest.raises(ValueError, match=f'train.{name} .*{told}'):
    open_train(folder)


def test_a_deep_manifest_is_refused(folder):
  (folder / 'manifest.json').write_bytes(b'{"a":' * 10**5)
  with pytest.raises(ValueError, match='manifest.json is not JSON'):
    Store(folder)
