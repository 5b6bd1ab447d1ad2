"""Manifests: any byte changed, cut off, lost or added is found and named."""

import json
import os

import pytest

from meliad_rec.storage import checksums


@pytest.fixture
def folder(tmp_path):
  folder = tmp_path / '20'
  (folder / 'state' / 'd').mkdir(parents=True)
  (folder / 'state' / 'd' / 'abc').write_bytes(bytes(range(256)) * 3)
  (folder / 'state' / 'empty').touch()
  (folder / 'data.json').write_text('{"document": 3}')
  checksums.write(folder)
  for name in '_CHECKPOINT_METADATA', 'commit_success.txt':
    (folder / name).touch()
  return folder


def test_an_untouched_folder_has_no_damage(folder):
  assert checksums.damage(folder) == []


@pytest.mark.parametrize('name', ['state/d/abc', 'data.json', 'MANIFEST.json'])
def test_every_flipped_byte_names_its_file(folder, name):
  whole = (folder / name).read_bytes()
  for position in range(len(whole)):
    flipped = bytearray(whole)
    flipped[position] ^= 1 << position % 8
    (folder / name).write_bytes(flipped)
    phrases = checksums.damage(folder)
    # Blanks between JSON's tokens mean nothing.
    if phrases or not name.endswith('MANIFEST.json'):
      assert phrases == [f'{name} was changed']


@pytest.mark.parametrize('left', [0, 1, 300, 767])
def test_a_cut_file_is_named_with_its_lengths(folder, left):
  os.truncate(folder / 'state/d/abc', left)
  assert checksums.damage(folder) == [f'state/d/abc has {left} of 768 B']


def test_a_cut_manifest_is_named(folder):
  size = (folder / checksums.NAME).stat().st_size
  for left in range(size - 1, 0, -1):
    os.truncate(folder / checksums.NAME, left)
    assert checksums.damage(folder) == ['MANIFEST.json was changed']


def test_missing_and_added_files_are_named(folder):
  for name in (
    'state/d/abc',
    'state/empty',
    'data.json',
    'MANIFEST.json',
    '_CHECKPOINT_METADATA',
    'commit_success.txt',
  ):
    whole = (folder / name).read_bytes()
    (folder / name).unlink()
    assert checksums.damage(folder) == [f'{name} is missing']
    (folder / name).write_bytes(whole)
  (folder / 'state/d/new').touch()
  assert checksums.damage(folder) == ['state/d/new was added']


def test_a_forged_manifest_leads_nowhere(folder, tmp_path):
  """Names that leave the folder are never opened; nor are links followed."""
  (tmp_path / 'secret').write_text('x')
  for name in '../secret', str(tmp_path / 'secret'):
    files = {name: {'bytes': 1, 'sha256': 'x'}}
    text = json.dumps({'files': files, 'sha256': checksums._seal(files)})
    (folder / checksums.NAME).write_text(text)
    assert f'{name} is missing' in checksums.damage(folder)
  (folder / 'data.json').unlink()
  (folder / 'data.json').symlink_to(tmp_path / 'secret')
  checksums.write(folder)
  assert checksums.damage(folder) == ['data.json leads out of the folder']
