"""What commands that use a run are given, or one sentence says why not."""

import types

import pytest

from meliad_rec.commands.run_flags import check_split
from meliad_rec.commands.run_flags import read_text


def test_read_text(tmp_path):
  (tmp_path / 'a').write_bytes('ö\r\n'.encode())
  assert read_text(tmp_path / 'a') == 'ö\r\n'
  (tmp_path / 'b').write_bytes(b'ab\xff')
  with pytest.raises(ValueError, match=r'b is not UTF-8 \(byte 2\); convert'):
    read_text(tmp_path / 'b')
  with pytest.raises(ValueError, match=r'c cannot be read \(No such file'):
    read_text(tmp_path / 'c')


@pytest.mark.parametrize(
  'known, told', [('books:1', False), (None, False), ('books:0', True)]
)
def test_data_that_have_changed_are_told(known, told, caplog):
  run = types.SimpleNamespace(validation=known)
  documents = types.SimpleNamespace(identity='books:1')
  data = types.SimpleNamespace(documents={'validation': documents}.get)
  check_split(run, data)
  assert ('The data have changed since' in caplog.text) == told
