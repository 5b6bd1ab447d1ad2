"""Folders of steps, of which some wait for what replaces them."""

from etils import epath
import jax.numpy as jnp
import pytest

from meliad_rec.storage import step_writer
from meliad_rec.storage.checkpoints import Checkpoints
from tests import bucket


@pytest.fixture
def directory(tmp_path):
  for name in '3.old', '10', '10.old', '20.corrupt', 'x.old', '30.tmp':
    (tmp_path / name).mkdir()
    (tmp_path / name / 'from').write_text(name)
  return epath.Path(tmp_path)


def test_what_was_set_aside_is_a_step_until_there_is_a_new_one(directory):
  found = step_writer.folders(directory)
  assert {step: path.name for step, path in found.items()} == {
    3: '3.old',
    10: '10',
  }
  assert step_writer.folders(directory / 'none') == {}


def test_settled(directory):
  for _ in range(2):
    step_writer.settle(directory)
    names = {path.name for path in directory.iterdir()}
    assert names == {'3', '10', '20.corrupt', 'x.old', '30.tmp'}
  assert (directory / '3' / 'from').read_text() == '3.old'
  assert (directory / '10' / 'from').read_text() == '10'


def test_set_aside_it_is_still_found(directory):
  step_writer.settle(directory)
  step_writer.set_aside(directory / '10')
  assert step_writer.folders(directory)[10].name == '10.old'


def test_in_a_bucket_a_step_is_one_when_it_is_committed(tmp_path, monkeypatch):
  """A run was killed while it saved step 20 again."""
  with bucket.served(tmp_path, monkeypatch):
    checkpoints = Checkpoints('gs://bucket/run')
    checkpoints.save(20, {'x': jnp.ones(3)}, {}, {})
    checkpoints.close()
    step_writer.set_aside(checkpoints.directory / '20')
    (checkpoints.directory / '20' / 'half').mkdir(parents=True)
    (checkpoints.directory / '30' / 'state').mkdir(parents=True)
    assert checkpoints.steps() == [20]
    step, state, _, _ = Checkpoints('gs://bucket/run').restore(
      {'x': jnp.zeros(3)}
    )
  assert step == 20 and (state['x'] == 1).all()
  assert not (tmp_path / 'bucket' / 'run' / '20' / 'half').exists()
  names = {path.name for path in (tmp_path / 'bucket' / 'run').iterdir()}
  assert names == {'20', '30'}


def test_a_bucket_that_cannot_be_asked_is_not_an_empty_one(
  tmp_path, monkeypatch
):
  def fail(*_):
    raise OSError('503')

  with bucket.served(tmp_path, monkeypatch):
    monkeypatch.setattr(bucket._Backend, 'exists', fail)
    with pytest.raises(OSError, match='503'):
      Checkpoints('gs://bucket/run').latest()
