"""Folders of steps, of which some wait for what replaces them."""

from etils import epath
import pytest

from meliad_rec.checkpoint import replaced


@pytest.fixture
def directory(tmp_path):
  for name in '3.old', '10', '10.old', '20.corrupt', 'x.old', '30.tmp':
    (tmp_path / name).mkdir()
    (tmp_path / name / 'from').write_text(name)
  return epath.Path(tmp_path)


def test_what_was_set_aside_is_a_step_until_there_is_a_new_one(directory):
  found = replaced.folders(directory)
  assert {step: path.name for step, path in found.items()} == {
    3: '3.old',
    10: '10',
  }
  assert replaced.folders(directory / 'none') == {}


def test_settled(directory):
  for _ in range(2):
    replaced.settle(directory)
    names = {path.name for path in directory.iterdir()}
    assert names == {'3', '10', '20.corrupt', 'x.old', '30.tmp'}
  assert (directory / '3' / 'from').read_text() == '3.old'
  assert (directory / '10' / 'from').read_text() == '10'


def test_set_aside_it_is_still_found(directory):
  replaced.settle(directory)
  replaced.set_aside(directory / '10')
  assert replaced.folders(directory)[10].name == '10.old'
