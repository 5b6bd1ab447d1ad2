"""Stores: written completely or not at all, read back exactly, damage found."""

import errno
import hashlib
import json
import os

import numpy as np
import pytest

from meliad_rec.data import store
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.store import Store
from meliad_rec.data.vocabulary import Bytes
from tests import pieces

TEXTS = {'train': ['first one', '', 'žluť'], 'test': ['last']}


def stream(texts, vocabulary):
  for i, text in enumerate(texts):
    ids = vocabulary.encode(text)
    yield Document(f'a/{i}.txt', ids, len(text.encode()), len(text.split()))


def write(path, vocabulary, force=False):
  splits = {split: stream(texts, vocabulary) for split, texts in TEXTS.items()}
  return store.write(path, splits, vocabulary, 'a test', force=force)


def test_a_store_is_read_as_it_was_written(tmp_path):
  vocabulary = pieces.vocabulary()
  written = write(tmp_path / 'a' / 'store', vocabulary)
  assert write(tmp_path / 'again', vocabulary).manifest == written.manifest
  # A store can be moved, because it contains all it needs.
  (tmp_path / 'a' / 'store').rename(tmp_path / 'moved')
  moved = Store(tmp_path / 'moved')
  assert moved.splits == ['train', 'test']
  assert moved.manifest['source'] == 'a test'
  assert moved.vocabulary.identity == vocabulary.identity
  for split, texts in TEXTS.items():
    documents = moved.documents(split)
    expected = Documents.collect(stream(texts, vocabulary), vocabulary)
    assert isinstance(documents.tokens, np.memmap)
    assert documents.identity == expected.identity
    assert documents.names == expected.names
    assert [moved.vocabulary.decode(ids) for ids in documents] == texts
  store.verify(tmp_path / 'moved')
  with pytest.raises(ValueError, match="'dev'. Choose one of train, test"):
    moved.documents('dev')


def test_the_format_on_disk_stays(tmp_path):
  """Golden, because stores of earlier versions must remain readable."""
  manifest = write(tmp_path / 'store', Bytes()).manifest
  for entry in manifest['splits'].values():
    for file in entry['files'].values():
      assert len(file.pop('sha256')) == 64
  text = json.dumps(manifest, sort_keys=True).encode()
  assert hashlib.sha256(text).hexdigest().startswith('0dc5a0216bc57c3e')


def test_large_ids_are_kept(tmp_path):
  class Large(Bytes):
    size = 2**17

  ids = np.array([1, 2**16, 2**17 - 1])
  documents = iter([Document('x', ids, 3, 1)])
  store.write(tmp_path / 'store', {'train': documents}, Large(), '')
  assert Store(tmp_path / 'store').manifest['dtype'] == '<u4'
  raw = np.fromfile(tmp_path / 'store' / 'train.tokens', '<u4')
  np.testing.assert_array_equal(raw, ids)


def test_only_a_store_is_replaced_and_only_with_force(tmp_path):
  write(tmp_path / 'store', Bytes())
  with pytest.raises(ValueError, match='--force'):
    write(tmp_path / 'store', pieces.vocabulary())
  assert Store(tmp_path / 'store').vocabulary.identity == 'bytes'
  (tmp_path / 'thesis').mkdir()
  (tmp_path / 'thesis' / 'manifest.json').write_text('{}')
  with pytest.raises(ValueError, match='thesis'):
    write(tmp_path / 'thesis', Bytes(), force=True)
  assert (tmp_path / 'thesis' / 'manifest.json').exists()
  (tmp_path / 'store' / 'checkpoints').mkdir()
  with pytest.raises(ValueError, match='checkpoints'):
    write(tmp_path / 'store', pieces.vocabulary(), force=True)


def test_a_store_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
  path, vocabulary = tmp_path / 'store', pieces.vocabulary()
  write(path, Bytes())

  def killed(*_, **__):
    raise KeyboardInterrupt

  with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
    patched.setattr(store.shutil, 'rmtree', killed)
    write(path, vocabulary, force=True)
  assert Store(path).vocabulary.identity == vocabulary.identity
  rename = iter([os.rename, killed, os.rename])
  with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
    patched.setattr(store.os, 'rename', lambda *a: next(rename)(*a))
    write(path, Bytes(), force=True)
  assert Store(path).vocabulary.identity == vocabulary.identity
  store.verify(path)


def test_links_and_the_current_folder_can_be_written(tmp_path, monkeypatch):
  (tmp_path / 'disk').mkdir()
  link = tmp_path / 'link'
  link.symlink_to(tmp_path / 'disk')
  write(link, Bytes())
  vocabulary = pieces.vocabulary()
  assert write(link, vocabulary, force=True).path == tmp_path / 'disk'
  assert link.is_symlink()
  assert Store(link).vocabulary.identity == vocabulary.identity
  (tmp_path / 'here').mkdir()
  monkeypatch.chdir(tmp_path / 'here')
  write('.', Bytes())
  store.verify(tmp_path / 'here')


def test_addresses_are_refused(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for use in Store, lambda path: write(path, Bytes()):
    with pytest.raises(ValueError, match='gs://bucket/store'):
      use('gs://bucket/store')
  assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named(tmp_path):
  def full():
    raise OSError(errno.ENOSPC, 'No space left on device')
    yield

  with pytest.raises(OSError, match='No space left') as told:
    store.write(tmp_path / 's', {'train': full()}, Bytes(), 'test')
  assert told.value.filename == str(tmp_path / 's')


def test_a_failed_write_leaves_the_old_store(tmp_path):
  def broken():
    yield from stream(['good'], Bytes())
    raise ValueError('broken')

  write(tmp_path / 'store', Bytes())
  with pytest.raises(ValueError, match='broken'):
    store.write(tmp_path / 'store', {'train': broken()}, Bytes(), '', True)
  assert [path.name for path in tmp_path.iterdir()] == ['store']
  store.verify(tmp_path / 'store')


@pytest.mark.parametrize(
  'documents, message',
  [
    ([Document('odd', np.array([0, 5]), 2, 1)], "'odd' .* 258"),
    ([Document('odd', np.array([5]), 2, 1, np.array([5]))], "'odd' has labels"),
    (
      [Document('odd', np.array([5]), 2, 1, first_length=1)],
      "'odd' has a source and a target",
    ),
    ([], "'train' has no text"),
    ([Document('empty', np.array([], int), 0, 0)], "'train' has no text"),
  ],
)
def test_splits_that_cannot_be_written(tmp_path, documents, message):
  with pytest.raises(ValueError, match=message):
    store.write_split(tmp_path, 'train', iter(documents), Bytes())


def test_every_changed_byte_is_found(tmp_path):
  written = write(tmp_path / 'store', Bytes())
  for split, entry in written.manifest['splits'].items():
    for kind, file in entry['files'].items():
      path = tmp_path / 'store' / file['name']
      good = path.read_bytes()
      path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
      with pytest.raises(ValueError, match=f'{split}.{kind}.* changed'):
        store.verify(tmp_path / 'store')
      path.write_bytes(good)
  store.verify(tmp_path / 'store')


def test_another_vocabulary_in_the_folder_is_found(tmp_path):
  write(tmp_path / 'store', pieces.vocabulary())
  # With a changed score it is still a model of the same size.
  content = bytearray(pieces.vocabulary().model)
  content[content.rindex(b'\x15') + 1] ^= 1
  (tmp_path / 'store' / 'vocabulary.model').write_bytes(bytes(content))
  with pytest.raises(ValueError, match='vocabulary'):
    Store(tmp_path / 'store')


def saved(folder, values):
  np.save(folder / 'x.npy', np.array(values), allow_pickle=True)
  return (folder / 'x.npy').read_bytes()


@pytest.mark.parametrize(
  'kind, content, message',
  [
    ('tokens', b'x' * 28, 'train.tokens .* 15 tokens'),
    ('words', [print, 1, 2], 'train.words.npy'),  # Never unpickled.
    ('names', json.dumps(['a']).encode(), 'train.names.json .* 3'),
    ('starts', b'', 'train.starts.npy'),
    ('starts', [0, 9, 15], r'int64\[3\], not int64\[4\]'),
    ('starts', [0, 9, 9, 99], 'train.starts.npy .* 15'),
    ('starts', [0, 9, 8, 15], 'train.starts.npy .* 15'),
  ],
)
def test_invalid_files_are_named(tmp_path, kind, content, message):
  """Even if the manifest agrees with them."""
  documents = stream(TEXTS['train'], Bytes())
  entry = store.write_split(tmp_path, 'train', documents, Bytes())
  path = tmp_path / entry['files'][kind]['name']
  if isinstance(content, list):
    content = saved(tmp_path, content)
  path.write_bytes(content)
  entry['files'][kind] = store.file_entry(path)
  with pytest.raises(ValueError, match=message):
    store.read_split(tmp_path, entry, Bytes())


@pytest.mark.parametrize('name', ['../x', 'a/../x', '', 'link'])
def test_no_name_or_link_leads_out_of_the_folder(tmp_path, name):
  (tmp_path / 'x').write_text('secret')
  folder = tmp_path / 'store'
  (folder / 'a').mkdir(parents=True)
  (folder / 'link').symlink_to(tmp_path / 'x')
  with pytest.raises(ValueError, match='not directly in that folder'):
    store.find_file(folder, {'name': name, 'size': 6, 'sha256': ''})


def test_missing_and_short_files_are_named(tmp_path):
  path = tmp_path / 'a.tokens'
  path.write_bytes(b'tokens')
  entry = store.file_entry(path)
  assert store.find_file(tmp_path, entry) == path
  path.write_bytes(b'token')
  with pytest.raises(ValueError, match='a.tokens has 5 bytes, but 6'):
    store.find_file(tmp_path, entry)
  path.unlink()
  with pytest.raises(ValueError, match='a.tokens is missing'):
    store.find_file(tmp_path, entry)


@pytest.mark.parametrize(
  'keys, value',
  [
    (['format'], 2),
    (['splits', 'train'], {}),
    (['splits', 'train', 'files', 'tokens', 'name'], 7),
    (['vocabulary', 'more'], 1),
  ],
)
def test_manifests_of_another_format_are_refused(tmp_path, keys, value):
  manifest = write(tmp_path / 'store', Bytes()).manifest
  inner = manifest
  for key in keys[:-1]:
    inner = inner[key]
  inner[keys[-1]] = value
  (tmp_path / 'store' / store.MANIFEST).write_text(json.dumps(manifest))
  with pytest.raises(ValueError, match='store format'):
    store.read_manifest(tmp_path / 'store')


def test_missing_and_broken_manifests_are_named(tmp_path):
  with pytest.raises(ValueError, match='not a token store'):
    store.read_manifest(tmp_path)
  (tmp_path / store.MANIFEST).write_text('{')
  with pytest.raises(ValueError, match='manifest.json is not JSON'):
    store.read_manifest(tmp_path)
