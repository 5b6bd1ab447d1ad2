"""Texts are read whole, or one sentence says why not."""

import pytest

from meliad_rec.run_flags import read_text


def test_read_text(tmp_path):
  (tmp_path / 'a').write_bytes('ö\r\n'.encode())
  assert read_text(tmp_path / 'a') == 'ö\r\n'
  (tmp_path / 'b').write_bytes(b'ab\xff')
  with pytest.raises(ValueError, match=r'b is not UTF-8 \(byte 2\); convert'):
    read_text(tmp_path / 'b')
  with pytest.raises(ValueError, match=r'c cannot be read \(No such file'):
    read_text(tmp_path / 'c')
