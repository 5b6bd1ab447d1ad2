"""Checksums: every change of an array or a file is found, no layout matters."""

import errno
import json
import os
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from meliad_rec.storage import checksums
from meliad_rec.storage.checksums import digest
from meliad_rec.storage.checksums import fingerprints


def random_array(dtype, shape):
  rng = np.random.default_rng(4)
  count = np.dtype(jnp.dtype(dtype)).itemsize * int(np.prod(shape))
  raw = rng.integers(0, 2 if dtype == 'bool' else 256, count, np.uint8)
  return raw.view(jnp.dtype(dtype)).reshape(shape)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'int8', 'bool'])
@pytest.mark.parametrize('shape', [(3, 4), ()])
def test_the_value_follows_the_definition(dtype, shape):
  """In Python's integers. Each word is mixed by bijections that depend on its
  place, so every flipped bit and all elements that are swapped show."""

  def mix(h):
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16

  x = random_array(dtype, shape)
  words = x.view(f'uint{8 * x.itemsize}').ravel().tolist()
  lanes = (0x9E3779B1, 0x85EBCA77), (0xC2B2AE3D, 0x27D4EB2F)
  sums = [
    sum(mix(w ^ mix((i * a + b) % 2**32)) for i, w in enumerate(words)) % 2**32
    for a, b in lanes
  ]
  assert fingerprints({'x': x}) == {'x': f'{sums[0]:08x}{sums[1]:08x}'}


def test_shardings_do_not_matter():
  x = random_array('float32', (16, 24))
  plain = fingerprints({'x': x})
  for shape in (8, 1), (4, 2):
    mesh = jax.make_mesh(shape, ('a', 'b'), axis_types=(AxisType.Auto,) * 2)
    for spec in ('a', 'b'), (None, ('a', 'b')):
      sharding = NamedSharding(mesh, PartitionSpec(*spec))
      assert fingerprints({'x': jax.device_put(x, sharding)}) == plain


def test_digest_sees_values_names_shapes_and_dtypes():
  x = np.zeros((2, 3), np.float32)
  trees = (
    {'x': x},
    {'y': x},
    {'x': x.T},
    {'x': x.view(np.int32)},
    {'x': x + 1},
    {'x': x, 'y': x},
  )
  assert len({digest(tree) for tree in trees}) == len(trees)
  assert digest({'x': x}) == digest({'x': jnp.zeros((2, 3))})


def test_unsupported_dtypes_are_refused():
  for leaf in jax.random.key(0), np.zeros(2, np.complex64), np.zeros(2, int):
    with pytest.raises(ValueError, match='rng has dtype'):
      fingerprints({'rng': leaf})


@pytest.fixture
def folder(tmp_path):
  folder = tmp_path / '20'
  (folder / 'state' / 'd').mkdir(parents=True)
  (folder / 'state' / 'd' / 'abc').write_bytes(bytes(range(64)))
  (folder / 'state' / 'empty').touch()
  (folder / 'data.json').write_text('{"document": 3}')
  checksums.write(folder)
  for name in '_CHECKPOINT_METADATA', 'commit_success.txt':
    (folder / name).touch()
  return folder


@pytest.mark.parametrize('name', ['state/d/abc', 'data.json', 'MANIFEST.json'])
def test_every_flipped_byte_names_its_file(folder, name):
  assert checksums.damage(folder) == []
  whole = (folder / name).read_bytes()
  for position in range(0, len(whole), 1 + len(whole) // 99):
    flipped = bytearray(whole)
    flipped[position] ^= 1 << position % 8
    (folder / name).write_bytes(flipped)
    phrases = checksums.damage(folder)
    # Whitespace between the tokens of JSON means nothing.
    if phrases or not name.endswith('MANIFEST.json'):
      assert phrases == [f'{name} was changed']


def test_cut_files_are_named(folder):
  for left in 63, 1, 0:
    os.truncate(folder / 'state/d/abc', left)
    assert checksums.damage(folder) == [f'state/d/abc has {left} of 64 B']
  size = (folder / checksums.NAME).stat().st_size
  for left in range(size - 1, 0, -9):
    os.truncate(folder / checksums.NAME, left)
    assert checksums.damage(folder) == ['MANIFEST.json was changed']


def test_errors_of_the_disk_are_damage_and_others_are_not(folder, monkeypatch):
  def fail(code):
    monkeypatch.setattr(
      checksums, '_measure', mock.Mock(side_effect=OSError(code, 'why'))
    )

  fail(errno.EIO)
  assert checksums.damage(folder)[0] == 'data.json cannot be read (why)'
  fail(errno.EACCES)
  with pytest.raises(OSError, match='why'):
    checksums.damage(folder)


def test_missing_and_added_files_are_named(folder):
  paths = (path for path in folder.rglob('*') if path.is_file())
  names = [path.relative_to(folder).as_posix() for path in paths]
  assert len(names) == 6
  for name in names:
    whole = (folder / name).read_bytes()
    (folder / name).unlink()
    assert checksums.damage(folder) == [f'{name} is missing']
    (folder / name).write_bytes(whole)
  (folder / 'state/d/new').touch()
  assert checksums.damage(folder) == ['state/d/new was added']


def test_a_forged_manifest_cannot_lead_out_of_its_folder(folder, tmp_path):
  """Names and links that lead out of the folder are never opened."""
  (tmp_path / 'secret').write_text('x')
  for name in '../secret', str(tmp_path / 'secret'):
    files = {name: {'bytes': 1, 'sha256': 'x'}}
    text = json.dumps({'files': files, 'sha256': checksums.sha256(files)})
    (folder / checksums.NAME).write_text(text)
    assert f'{name} is missing' in checksums.damage(folder)
  (folder / 'data.json').unlink()
  (folder / 'data.json').symlink_to(tmp_path / 'secret')
  checksums.write(folder)
  assert checksums.damage(folder) == ['data.json leads out of the folder']


def test_every_flipped_byte_of_sealed_json_is_found():
  value = {'a': [1, 2.5, None], 'b': 'text', '3': {}}
  whole = checksums.seal({'a': [1, 2.5, None], 'b': 'text', 3: {}})
  assert checksums.unseal(whole) == value
  for i in range(len(whole)):
    flipped = whole[:i] + chr(ord(whole[i]) ^ 1) + whole[i + 1 :]
    if flipped[i] != '!':  # A changed blank between tokens means nothing.
      with pytest.raises(ValueError, match='changed'):
        checksums.unseal(flipped)
