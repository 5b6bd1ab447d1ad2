"""One step on disk, beside what tests/checkpoint_test.py does to whole runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.storage import checksums
from meliad_rec.storage.checkpoints import Checkpoints
from meliad_rec.storage.saved_step import CheckpointError
from meliad_rec.storage.saved_step import DamagedError
from meliad_rec.storage.saved_step import SavedStep
from meliad_rec.storage.saved_step import table

ABOUT = {'data': 'd1', 'validation': 'v1'}


@pytest.fixture
def step(tmp_path):
  checkpoints = Checkpoints(tmp_path, best_metric='loss')
  state = {'params': {'a': jnp.arange(3.0)}, 'ema': {'a': jnp.ones(3)}}
  checkpoints.save(7, state, {'offset': 1}, ABOUT, {'loss': 0.5})
  checkpoints.close()
  return SavedStep(tmp_path / '7')


def edit_meta(step, old, new):
  """Changes meta as someone would who also rewrites the manifest."""
  path = step.folder / 'meta' / 'metadata'
  text = path.read_text()
  assert old in text
  path.write_text(text.replace(old, new))
  (step.folder / checksums.NAME).unlink()
  for name in '_CHECKPOINT_METADATA', 'commit_success.txt':
    assert (step.folder / name).exists()
  checksums.write(step.folder)


def test_the_table_tells_shape_dtype_and_values():
  (entry,) = table({'x': jnp.zeros((2, 3), jnp.bfloat16)}).values()
  assert entry[:2] == [[2, 3], 'bfloat16']
  (other,) = table({'x': jnp.ones((2, 3), jnp.bfloat16)}).values()
  assert entry[2] != other[2]


@pytest.mark.parametrize('part, value', [('params/', [0, 1, 2]), ('ema/', 1)])
def test_a_part_of_the_state(step, part, value):
  """Targets without a sharding land on the first device, as their class."""
  target = {'a': jax.ShapeDtypeStruct((3,), jnp.float32)}
  tree, data, about = step.load(target, {'data': 'd1'}, part)
  assert np.array_equal(tree['a'], np.broadcast_to(value, 3))
  assert tree['a'].devices() == {jax.devices()[0]}
  assert (data, about) == ({'offset': 1}, ABOUT)


def test_scores_go_by_name(step):
  assert step.score('loss') == step.score(None) == (0.5, 'v1')
  assert step.score('accuracy') is None


@pytest.mark.parametrize('how', ['cut', 'another score', 'no manifest'])
def test_a_score_that_was_changed_is_told_and_counts_as_none(step, caplog, how):
  path = step.folder / 'meta' / 'metadata'
  text = path.read_text()
  if how == 'cut':
    path.write_text('{')
  elif how == 'another score':
    assert '0.5' in text
    path.write_text(text.replace('0.5', '0.1'))
  else:
    (step.folder / checksums.NAME).unlink()
  assert step.score('loss') is None
  assert f'Step 7 of {step.folder.parent} has no score: ' in caplog.text


def test_a_later_format_is_refused(step):
  edit_meta(step, '"format": 1', '"format": 2')
  with pytest.raises(CheckpointError, match='has format 2, this version reads'):
    step.load({'a': jnp.zeros(3)}, {}, 'params/')


def test_a_changed_fingerprint_is_damage(step):
  mark = step.meta()['leaves']['params/a'][2]
  edit_meta(step, mark, '0' * 16)
  with pytest.raises(DamagedError, match='params/a has other values'):
    step.load({'a': jnp.zeros(3)}, {}, 'params/')


def test_put_aside_takes_the_place_of_an_earlier_one(step):
  aside = step.folder.parent / '7.corrupt'
  (aside / 'old').mkdir(parents=True)
  step.put_aside()
  assert not step.folder.exists()
  assert not (aside / 'old').exists()
  assert (aside / 'state').exists()
