"""Array files: round trips, and which files are refused."""

import errno
import json
import os
import re
import struct

import numpy as np
import pytest

from meliad_rec.storage import array_file

ARRAYS = {'a/b': np.arange(6).reshape(2, 3), 'c': np.float32([0.5, -0.0])}
FACTS = {'names': ['naïve', ''], 'step': 3}


def test_round_trip(tmp_path):
  path = tmp_path / 'x.npz'
  array_file.write(path, 'plums', {'old': np.zeros(9)}, {})
  before = os.umask(0o027)
  try:
    array_file.write(path, 'plums', ARRAYS, FACTS)
  finally:
    os.umask(before)
  assert path.stat().st_mode & 0o777 == 0o640
  arrays, facts = array_file.read(path, 'plums', 'pick')
  assert facts == FACTS
  assert arrays.keys() == ARRAYS.keys()
  for name, a in ARRAYS.items():
    np.testing.assert_array_equal(arrays[name], a)
    assert arrays[name].dtype == a.dtype


class Gone:
  def __array__(self, *_, **__):
    raise RuntimeError('gone')


def test_a_failed_write_keeps_the_old_file(tmp_path):
  path = tmp_path / 'x.npz'
  array_file.write(path, 'plums', ARRAYS, FACTS)
  with pytest.raises(RuntimeError, match='gone'):
    array_file.write(path, 'plums', {'a': Gone()}, FACTS)
  assert array_file.read(path, 'plums', 'pick')[1] == FACTS
  assert [each.name for each in tmp_path.iterdir()] == ['x.npz']
  with pytest.raises(ValueError, match='cannot be written'):
    array_file.write(tmp_path / 'no' / 'x.npz', 'plums', ARRAYS, FACTS)


def damaged_stream(path):
  """Makes a compressed file that cannot be decompressed."""
  facts = json.dumps({'kind': 'plums', 'facts': {}}).encode()
  np.savez_compressed(path, meta=np.frombuffer(facts, np.uint8))
  content = bytearray(path.read_bytes())
  names, extra = struct.unpack('<HH', content[26:30])
  content[30 + names + extra] = 0xFF  # Not a block type of deflate.
  return bytes(content)


def test_other_and_damaged_files_are_refused(tmp_path):
  with pytest.raises(ValueError, match='pick'):
    array_file.read(tmp_path / 'x', 'plums', 'pick')
  array_file.write(tmp_path / 'pears', 'pears', ARRAYS, FACTS)
  array_file.write(tmp_path / 'plums', 'plums', ARRAYS, FACTS)
  whole = (tmp_path / 'plums').read_bytes()
  # A compression method that zip does not have.
  method = re.sub(rb'(?s)(PK\x01\x02.{6}).', rb'\1a', whole)
  (tmp_path / 'method').write_bytes(method)
  (tmp_path / 'cut').write_bytes(whole[: len(whole) // 2])
  (tmp_path / 'text').write_text('text')
  np.savez(tmp_path / 'bare.npz', a=np.zeros(2))
  np.savez(tmp_path / 'pickle.npz', meta=np.array([{}], object))
  (tmp_path / 'empty').touch()
  (tmp_path / 'bits').write_bytes(damaged_stream(tmp_path / 'a.npz'))
  files = 'pears', 'cut', 'text', 'bare.npz', 'pickle.npz', 'empty', 'bits'
  for name in (*files, 'method'):
    with pytest.raises(ValueError, match='plums.* pick'):
      array_file.read(tmp_path / name, 'plums', 'pick')


def test_a_file_that_may_not_be_read_is_not_called_damaged(monkeypatch):
  def load(path, **_):
    raise PermissionError(errno.EACCES, 'Permission denied', path)

  monkeypatch.setattr(np, 'load', load)
  with pytest.raises(PermissionError, match='x.npz'):
    array_file.read('x.npz', 'plums', 'pick')
