"""Files that are checked early, and written whole."""

import os

import pytest

from meliad_rec.storage import output_file


def test_a_path_that_cannot_be_written_is_found_early(tmp_path, monkeypatch):
  output_file.check(tmp_path / 's.npz', '.npz')
  output_file.check(tmp_path / 's.png', '.gif', '.png')
  output_file.check(tmp_path / 'any')
  with pytest.raises(ValueError, match='of .*none.* does not exist'):
    output_file.check(tmp_path / 'none' / 's.npz', '.npz')
  with pytest.raises(ValueError, match='cannot be written'):
    output_file.check(tmp_path)
  with pytest.raises(ValueError, match=r'book\.txt does not end in \.gif or'):
    output_file.check(tmp_path / 'book.txt', '.gif', '.png')
  monkeypatch.setattr(os, 'access', lambda path, mode: mode != os.W_OK)
  with pytest.raises(ValueError, match='cannot be written'):
    output_file.check(tmp_path / 's.npz', '.npz')
  assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
  path = tmp_path / 'a'
  output_file.write(path, 'old')
  output_file.write(path, b'new')
  assert path.read_bytes() == b'new'
  assert path.stat().st_mode & 0o777 == 0o666 & ~umask()
  with pytest.raises(KeyError), output_file.replacing(path) as fresh:
    fresh.write_bytes(b'half')
    raise KeyError
  assert path.read_bytes() == b'new'
  assert list(tmp_path.iterdir()) == [path]


def umask():
  mask = os.umask(0)
  os.umask(mask)
  return mask
