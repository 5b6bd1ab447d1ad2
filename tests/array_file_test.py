"""Files of arrays: what comes back, and what is refused."""

import numpy as np
import pytest

from meliad_rec import array_file

ARRAYS = {'a/b': np.arange(6).reshape(2, 3), 'c': np.float32([0.5, -0.0])}
FACTS = {'names': ['naïve', ''], 'step': 3}


def test_all_comes_back_and_nothing_else_is_left(tmp_path):
  path = tmp_path / 'x.npz'
  array_file.write(path, 'plums', {'old': np.zeros(9)}, {})
  array_file.write(path, 'plums', ARRAYS, FACTS)
  arrays, facts = array_file.read(path, 'plums', 'pick')
  assert facts == FACTS
  assert arrays.keys() == ARRAYS.keys()
  for name, a in ARRAYS.items():
    np.testing.assert_array_equal(arrays[name], a)
    assert arrays[name].dtype == a.dtype
  assert [each.name for each in tmp_path.iterdir()] == ['x.npz']


def test_a_file_that_was_there_survives_what_cannot_be_written(tmp_path):
  path = tmp_path / 'x.npz'
  array_file.write(path, 'plums', ARRAYS, FACTS)
  with pytest.raises(RuntimeError, match='gone'):
    array_file.write(path, 'plums', {'a': Gone()}, FACTS)
  assert array_file.read(path, 'plums', 'pick')[1] == FACTS
  assert [each.name for each in tmp_path.iterdir()] == ['x.npz']
  with pytest.raises(ValueError, match='cannot be written .*; choose another'):
    array_file.write(tmp_path / 'no' / 'x.npz', 'plums', ARRAYS, FACTS)


class Gone:
  def __array__(self, *_, **__):
    raise RuntimeError('gone')


def test_what_is_refused(tmp_path):
  with pytest.raises(ValueError, match='no file .*x; write one with pick.'):
    array_file.read(tmp_path / 'x', 'plums', 'pick')
  path = tmp_path / 'pears'
  array_file.write(path, 'pears', ARRAYS, FACTS)
  whole = path.read_bytes()
  (tmp_path / 'cut').write_bytes(whole[: len(whole) // 2])
  (tmp_path / 'text').write_text('text')
  np.savez(tmp_path / 'bare.npz', a=np.zeros(2))
  np.savez(tmp_path / 'pickle.npz', meta=np.array([{}], object))
  for name in ('pears', 'cut', 'text', 'bare.npz', 'pickle.npz'):
    with pytest.raises(ValueError, match='holds no plums, .* again with pick.'):
      array_file.read(tmp_path / name, 'plums', 'pick')
