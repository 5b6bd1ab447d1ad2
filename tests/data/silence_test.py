"""Shut stderr drops what C code writes, and opens again after an error."""

import os

import pytest

from meliad_rec.data.seqio_tasks import silent_stderr


def test_only_what_is_written_meanwhile_is_dropped(capfd):
  os.write(2, b'before ')
  with pytest.raises(ValueError, match='told'), silent_stderr():
    os.write(2, b'meanwhile ')
    raise ValueError('told')
  os.write(2, b'after')
  assert capfd.readouterr().err == 'before after'
