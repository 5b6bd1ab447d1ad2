"""A manifest from elsewhere leads nowhere, and says what is wrong with it."""

import json

import pytest

from meliad_rec.data import store


def whole(folder):
  (folder / 'a.tokens').write_bytes(b'tokens')
  return {
    'format': store.FORMAT,
    'source': 'test',
    'dtype': '<u2',
    'vocabulary': {'identity': 'bytes', 'size': 259, 'files': {}},
    'splits': {
      'train': {
        'documents': 1,
        'tokens': 3,
        'bytes': 3,
        'words': 1,
        'files': dict.fromkeys(
          ('tokens', 'starts', 'bytes', 'words', 'names'),
          store.file_facts(folder / 'a.tokens'),
        ),
      }
    },
  }


def test_what_is_written_is_read(tmp_path):
  store.write_manifest(tmp_path, whole(tmp_path))
  assert store.read_manifest(tmp_path) == whole(tmp_path)


def test_the_facts_of_a_file_find_it(tmp_path):
  facts = whole(tmp_path)['splits']['train']['files']['tokens']
  assert facts['size'] == 6 and len(facts['sha256']) == 64
  assert store.find(tmp_path, facts) == tmp_path / 'a.tokens'


@pytest.mark.parametrize('name', ['../x', '/etc/hostname', '.', '', 'a/../x'])
def test_no_name_leads_out_of_the_folder(tmp_path, name):
  (tmp_path / 'x').write_text('secret')
  folder = tmp_path / 'store'
  (folder / 'a').mkdir(parents=True)
  with pytest.raises(ValueError, match='not in that folder'):
    store.find(folder, {'name': name, 'size': 6, 'sha256': ''})


def test_no_link_leads_out_of_the_folder(tmp_path):
  (tmp_path / 'x').write_text('secret')
  (tmp_path / 'store').mkdir()
  (tmp_path / 'store' / 'link').symlink_to(tmp_path / 'x')
  with pytest.raises(ValueError, match='not in that folder'):
    store.find(tmp_path / 'store', {'name': 'link', 'size': 6, 'sha256': ''})


def test_a_missing_or_short_file_is_named(tmp_path):
  facts = whole(tmp_path)['splits']['train']['files']['tokens']
  (tmp_path / 'a.tokens').write_bytes(b'token')
  with pytest.raises(ValueError, match='a.tokens has 5 bytes, but 6 were'):
    store.find(tmp_path, facts)
  (tmp_path / 'a.tokens').unlink()
  with pytest.raises(ValueError, match='a.tokens is missing'):
    store.find(tmp_path, facts)


@pytest.mark.parametrize(
  'path, value',
  [
    (['format'], 2),
    (['format'], None),
    (['splits'], []),
    (['splits', 'train'], {}),
    (['splits', 'train', 'tokens'], '3'),
    (['splits', 'train', 'files', 'tokens', 'name'], 7),
    (['vocabulary', 'more'], 1),
  ],
)
def test_another_shape_is_refused(tmp_path, path, value):
  changed = json.loads(json.dumps(whole(tmp_path)))
  inner = changed
  for key in path[:-1]:
    inner = inner[key]
  inner[path[-1]] = value
  (tmp_path / store.NAME).write_text(json.dumps(changed))
  with pytest.raises(ValueError, match='not a manifest of store format'):
    store.read_manifest(tmp_path)


def test_no_manifest_or_no_json_is_told(tmp_path):
  with pytest.raises(ValueError, match='is not a token store'):
    store.read_manifest(tmp_path)
  (tmp_path / store.NAME).write_text('{')
  with pytest.raises(ValueError, match='manifest.json is not JSON'):
    store.read_manifest(tmp_path)
