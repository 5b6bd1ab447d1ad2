"""An address is no path, however pathlib spells it."""

from pathlib import Path

import pytest

from meliad_rec.storage.workdir import local


@pytest.mark.parametrize('name', ['/data/a', 'a/b', 'runs:1/a', Path('a')])
def test_a_path_is_one(name):
  assert local(name, 'A store') == Path(name)


@pytest.mark.parametrize('name', ['gs://b/a', 's3://b/a', Path('gs://b/a')])
def test_an_address_is_refused(name):
  with pytest.raises(ValueError, match='^A store lies .*b/a is an address; '):
    local(name, 'A store')
