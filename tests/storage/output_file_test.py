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


def test_a_file_to_which_nothing_is_appended_is_not_created(tmp_path):
  path = tmp_path / 'new' / 'a'
  file = output_file.Appender(path)
  file.append(b'')
  file.close()
  assert not path.parent.exists()
  file = output_file.Appender(path)
  file.append(b'x')
  file.close()
  assert path.read_bytes() == b'x'


def test_links_and_pipes_stay(tmp_path):
  link, pipe = tmp_path / 'link', tmp_path / 'pipe'
  link.symlink_to(tmp_path / 'file')
  os.mkfifo(pipe)
  with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), 'rb') as reader:
    for path in link, pipe:
      output_file.check(path)
      output_file.write(path, 'text')
    assert reader.read() == b'text'
  assert link.is_symlink() and pipe.is_fifo()
  assert (tmp_path / 'file').read_text() == 'text'


def umask():
  mask = os.umask(0)
  os.umask(mask)
  return mask
