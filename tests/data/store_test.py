"""A store is written whole or not at all, and found again as it was."""

import numpy as np
import pytest

from meliad_rec.data import store
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.store import Store
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.data.vocabulary import SentencePiece
from tests.pieces import IDS
from tests.pieces import train

TEXTS = {'train': ['first one', '', 'žluť'], 'test': ['last']}


def stream(texts, vocabulary):
  for i, text in enumerate(texts):
    ids = vocabulary.encode(text)
    yield Document(f'{i}.txt', ids, len(text.encode()), len(text.split()))


def write(path, vocabulary, force=False):
  splits = {split: stream(texts, vocabulary) for split, texts in TEXTS.items()}
  return store.write(path, splits, vocabulary, 'a test', force=force)


@pytest.fixture(scope='module')
def pieces(tmp_path_factory):
  path = tmp_path_factory.mktemp('pieces') / 'any.model'
  model = train(['first one', 'last'] * 9, 280, **IDS)
  path.write_bytes(model)
  return SentencePiece(path)


@pytest.fixture(params=['bytes', 'pieces'])
def vocabulary(request, pieces):
  return Bytes() if request.param == 'bytes' else pieces


def test_a_store_is_found_as_it_was_written(tmp_path, vocabulary):
  write(tmp_path / 'a' / 'store', vocabulary)
  # Moved elsewhere, with all it needs inside.
  (tmp_path / 'a' / 'store').rename(tmp_path / 'moved')
  found = Store(tmp_path / 'moved')
  assert found.splits == ['train', 'test']
  assert found.manifest['source'] == 'a test'
  assert found.vocabulary.identity == vocabulary.identity
  for split, texts in TEXTS.items():
    expected = Documents.collect(stream(texts, vocabulary), vocabulary)
    assert found.documents(split).identity == expected.identity
    text = [found.vocabulary.decode(ids) for ids in found.documents(split)]
    assert text == texts
  store.verify(tmp_path / 'moved')


def test_the_same_documents_have_the_same_sums(tmp_path, vocabulary):
  one = write(tmp_path / 'one', vocabulary)
  assert one.manifest == write(tmp_path / 'two', vocabulary).manifest


def test_another_split_is_refused_by_name(tmp_path):
  with pytest.raises(ValueError, match="no split 'dev'; it has train, test"):
    write(tmp_path / 'store', Bytes()).documents('dev')


def test_a_store_is_replaced_only_by_force(tmp_path, pieces):
  write(tmp_path / 'store', Bytes())
  with pytest.raises(ValueError, match='exists; .* --force'):
    write(tmp_path / 'store', pieces)
  assert Store(tmp_path / 'store').vocabulary.identity == 'bytes'
  write(tmp_path / 'store', pieces, force=True)
  assert Store(tmp_path / 'store').vocabulary.identity == pieces.identity


def test_a_link_to_a_folder_stays_one(tmp_path, pieces):
  (tmp_path / 'disk').mkdir()
  link = tmp_path / 'link'
  link.symlink_to(tmp_path / 'disk')
  write(link, Bytes())
  assert write(link, pieces, force=True).path == tmp_path / 'disk'
  assert link.is_symlink()
  assert Store(link).vocabulary.identity == pieces.identity


def test_the_folder_one_is_in_is_written_too(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  write('.', Bytes())
  store.verify(tmp_path)


def test_an_address_is_refused(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for use in Store, lambda place: write(place, Bytes()):
    with pytest.raises(ValueError, match='token store lies in a local'):
      use('gs://bucket/store')
  assert not list(tmp_path.iterdir())


def test_what_is_no_store_is_never_replaced(tmp_path):
  (tmp_path / 'thesis').mkdir()
  (tmp_path / 'thesis' / 'manifest.json').write_text('{}')
  with pytest.raises(ValueError, match='is not a token store'):
    write(tmp_path / 'thesis', Bytes(), force=True)
  assert (tmp_path / 'thesis' / 'manifest.json').exists()


def test_a_failed_write_leaves_nothing_and_the_old_store(tmp_path):
  def broken():
    yield from stream(['good'], Bytes())
    raise ValueError('broken')

  write(tmp_path / 'store', Bytes())
  with pytest.raises(ValueError, match='broken'):
    store.write(tmp_path / 'store', {'train': broken()}, Bytes(), '', True)
  assert [path.name for path in tmp_path.iterdir()] == ['store']
  store.verify(tmp_path / 'store')


def test_every_changed_byte_is_found(tmp_path, vocabulary):
  written = write(tmp_path / 'store', vocabulary)
  for split, facts in written.manifest['splits'].items():
    for kind, file in facts['files'].items():
      path = tmp_path / 'store' / file['name']
      good = path.read_bytes()
      path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
      with pytest.raises(ValueError, match=f'{split}.{kind}.* changed'):
        store.verify(tmp_path / 'store')
      path.write_bytes(good)
  store.verify(tmp_path / 'store')


def test_another_vocabulary_in_the_folder_is_found(tmp_path, pieces):
  write(tmp_path / 'store', pieces)
  model = tmp_path / 'store' / 'vocabulary.model'
  # A score changed: still a model, of the same size.
  content = bytearray(pieces.model)
  place = content.rindex(b'\x15') + 1
  content[place] ^= 1
  model.write_bytes(bytes(content))
  with pytest.raises(ValueError, match='vocabulary'):
    Store(tmp_path / 'store')


def test_large_ids_are_kept(tmp_path):
  class Large(Bytes):
    size = 2**17

  ids = np.array([1, 2**16, 2**17 - 1])
  documents = iter([Document('x', ids, 3, 1)])
  store.write(tmp_path / 'store', {'train': documents}, Large(), '')
  facts = Store(tmp_path / 'store').manifest
  assert facts['dtype'] == '<u4'
  raw = np.fromfile(tmp_path / 'store' / 'train.tokens', '<u4')
  np.testing.assert_array_equal(raw, ids)
