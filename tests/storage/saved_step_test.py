"""One saved step; checkpoints_test.py tests whole directories."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.storage import checksums
from meliad_rec.storage.checkpoints import Checkpoints
from meliad_rec.storage.saved_step import check_about
from meliad_rec.storage.saved_step import check_leaves
from meliad_rec.storage.saved_step import CheckpointError
from meliad_rec.storage.saved_step import DamagedError
from meliad_rec.storage.saved_step import leaf_table
from meliad_rec.storage.saved_step import SavedStep

ABOUT = {'data': 'd1', 'validation': 'v1'}


@pytest.fixture
def step(tmp_path):
  checkpoints = Checkpoints(tmp_path, best_metric='loss')
  state = {'params': {'a': jnp.arange(3.0)}, 'ema': {'a': jnp.ones(3)}}
  checkpoints.save(7, state, {'offset': 1}, ABOUT, {'loss': 0.5})
  checkpoints.close()
  return SavedStep(tmp_path / '7')


def edit_meta(step, old, new):
  """Changes meta and rewrites the manifest to match."""
  path = step.folder / 'meta' / 'metadata'
  text = path.read_text()
  assert old in text
  path.write_text(text.replace(old, new))
  (step.folder / checksums.NAME).unlink()
  for name in '_CHECKPOINT_METADATA', 'commit_success.txt':
    assert (step.folder / name).exists()
  checksums.write(step.folder)


def test_the_table_has_shape_dtype_and_values():
  (entry,) = leaf_table({'x': jnp.zeros((2, 3), jnp.bfloat16)}).values()
  assert entry[:2] == [[2, 3], 'bfloat16']
  (other,) = leaf_table({'x': jnp.ones((2, 3), jnp.bfloat16)}).values()
  assert entry[2] != other[2]


@pytest.mark.parametrize('part, value', [('params/', [0, 1, 2]), ('ema/', 1)])
def test_a_part_of_the_state(step, part, value):
  """Targets without a sharding are put on the first device."""
  target = {'a': jax.ShapeDtypeStruct((3,), jnp.float32)}
  tree, data, about = step.load(target, {'data': 'd1'}, part)
  assert np.array_equal(tree['a'], np.broadcast_to(value, 3))
  assert tree['a'].devices() == {jax.devices()[0]}
  assert (data, about) == ({'offset': 1}, ABOUT)


def test_a_score_has_a_metric(step):
  assert step.score('loss') == step.score(None) == (0.5, 'v1')
  assert step.score('accuracy') is None


@pytest.mark.parametrize('how', ['cut', 'another score', 'no manifest'])
def test_a_changed_score_is_logged_and_not_used(step, caplog, how):
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
  assert (
    f'Step 7 of {step.folder.parent}: its score is not used: ' in caplog.text
  )


def test_a_newer_format_is_refused(step):
  edit_meta(step, '"format": 1', '"format": 2')
  with pytest.raises(CheckpointError, match='format 2'):
    step.load({'a': jnp.zeros(3)}, {}, 'params/')


def test_a_changed_fingerprint_is_damage(step):
  mark = step.meta()['leaves']['params/a'][2]
  edit_meta(step, mark, '0' * 16)
  with pytest.raises(DamagedError, match='params/a has changed values'):
    step.load({'a': jnp.zeros(3)}, {}, 'params/')


def test_put_aside_replaces_an_earlier_one(step):
  aside = step.folder.parent / '7.corrupt'
  (aside / 'old').mkdir(parents=True)
  step.put_aside()
  assert not step.folder.exists()
  assert not (aside / 'old').exists()
  assert (aside / 'state').exists()


SAVED = {
  'params/a': ((3, 4), 'float32'),
  'params/b': ((4,), 'float32'),
  'step': ((), 'int32'),
}
LEAVES = {
  'lacks params/c': SAVED | {'params/c': ((2,), 'float32')},
  'holds params/b': {k: v for k, v in SAVED.items() if k != 'params/b'},
  r'shape \(3, 4\) .* \(3, 5\)': SAVED | {'params/a': ((3, 5), 'float32')},
  'dtype float32 .* bfloat16': SAVED | {'params/b': ((4,), 'bfloat16')},
  'new/2 and 5 more': SAVED | {f'new/{i}': ((1,), 'int32') for i in range(8)},
}


@pytest.mark.parametrize('difference', LEAVES)
def test_a_difference_of_leaves_is_one_sentence(difference):
  pattern = rf'^Step 20 of W .*{difference}.*\.$'
  with pytest.raises(CheckpointError, match=pattern) as caught:
    check_leaves('Step 20 of W', SAVED, LEAVES[difference])
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize('key', ['tokenizer', 'data'])
def test_another_run_is_refused(key):
  about = {'tokenizer': 'bytes', 'data': 'd1'}
  with pytest.raises(CheckpointError, match=f'{key} {about[key]}.* v2;'):
    check_about('Step 20 of W', about, {key: 'v2'})


def test_what_agrees_passes():
  check_leaves('Step 20 of W', SAVED, dict(SAVED))
  check_about('W', {'tokenizer': 'bytes', 'data': 'd1'}, {'data': 'd1'})
