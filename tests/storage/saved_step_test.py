"""One saved step and its score; checkpoints_test.py has whole directories."""

import math
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.storage import checksums
from meliad_rec.storage import saved_step
from meliad_rec.storage.checkpoints import Best
from meliad_rec.storage.checkpoints import Checkpoints
from meliad_rec.storage.saved_step import check_about
from meliad_rec.storage.saved_step import check_leaves
from meliad_rec.storage.saved_step import CheckpointError
from meliad_rec.storage.saved_step import SavedStep
from tests.storage.checkpoints_test import ABOUT
from tests.storage.checkpoints_test import flip
from tests.storage.checkpoints_test import full_disk
from tests.storage.checkpoints_test import make_state
from tests.storage.checkpoints_test import save_all


@pytest.fixture
def step(tmp_path):
  checkpoints = Checkpoints(tmp_path, best_metric='loss')
  about = {'data': 'd1', 'validation': 'v1'}
  state = {'params': {'a': jnp.arange(3.0)}, 'ema': {'a': jnp.ones(3)}}
  checkpoints.save(7, state, {'offset': 1}, about, {'loss': 0.5})
  checkpoints.close()
  return SavedStep(tmp_path / '7')


@pytest.mark.parametrize('part, value', [('params/', [0, 1, 2]), ('ema/', 1)])
def test_a_part_of_the_state(step, part, value):
  """Targets without a sharding are put on the first device."""
  target = {'a': jax.ShapeDtypeStruct((3,), jnp.float32)}
  tree, data, found = step.load(target, {'data': 'd1'}, part)
  assert np.array_equal(tree['a'], np.broadcast_to(value, 3))
  assert tree['a'].devices() == {jax.devices()[0]}
  assert data == {'offset': 1} and found['validation'] == 'v1'


def test_a_score_has_a_metric(step):
  assert step.score('loss') == step.score(None) == (0.5, 'loss', 'v1')
  assert step.score('accuracy') is None


def test_a_newer_format_is_refused(step):
  path = step.folder / 'meta' / 'metadata'
  path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
  (step.folder / checksums.NAME).unlink()
  checksums.write(step.folder)
  with pytest.raises(CheckpointError, match='format 2'):
    step.load({'a': jnp.zeros(3)}, {}, 'params/')


def test_a_difference_of_facts_is_visible():
  """Also if long texts begin alike."""
  maze = 'Maze(side=9, limit=200, view=3, walls=0.25, step='
  one, other = (f'environment {maze}{step})' for step in (0, 1))
  said = f'trained with {one}, but this run has {other}. Give'
  with pytest.raises(CheckpointError, match=re.escape(said)):
    check_about('Step 3', {'environment': one}, {'environment': other})
  said = 'trained with tokenizer bytes, but this run has word list:1{35}[.]{4} '
  with pytest.raises(CheckpointError, match=said):
    check_about(
      '', {'tokenizer': 'bytes'}, {'tokenizer': f'word list:{10**64 // 9}'}
    )


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
  check_leaves('Step 20 of W', SAVED, dict(SAVED))
  pattern = rf'^Step 20 of W .*{difference}.*\.$'
  with pytest.raises(CheckpointError, match=pattern) as caught:
    check_leaves('Step 20 of W', SAVED, LEAVES[difference])
  assert '\n' not in str(caught.value)


@pytest.fixture
def run(tmp_path):
  """A run with steps 10 and 20, saved before they were evaluated."""
  save_all(tmp_path / 'run', 10, 20)
  return tmp_path / 'run'


def contents(folder):
  return {p: p.read_bytes() for p in folder.rglob('*') if p.is_file()}


@pytest.mark.parametrize('best_is, best', [('lowest', 3), ('highest', 2)])
def test_the_last_and_the_best_are_kept(tmp_path, best_is, best):
  losses = math.nan, 9.0, 2.0, 4.0, math.nan, 7.0
  for first in 0, 3:  # The second half as if in another process.
    checkpoints = Checkpoints(tmp_path, 2, 'loss', best_is)
    for step in range(first + 1, first + 4):
      metrics = {'loss': losses[step - 1]}
      checkpoints.save(step, {'x': jnp.float32(step)}, {}, {}, metrics)
    checkpoints.close()
  assert checkpoints.steps() == [best, 5, 6]
  # As in version 0.1.0, the steps themselves have the scores.
  assert not (tmp_path / 'scores.json').exists()
  target = {'x': jnp.float32(0)}
  assert Checkpoints(tmp_path).restore(target, 'best')[0] == best
  flip(tmp_path / str(best) / 'data/metadata')
  assert Checkpoints(tmp_path).restore(target, 'best')[0] == 6


def test_a_changed_score_is_not_used(tmp_path, caplog):
  checkpoints = Checkpoints(tmp_path, 1, 'loss')
  for step, loss in (1, 2.0), (2, 5.0):
    state = {'params': {'x': jnp.float32(step)}}
    checkpoints.save(step, state, {}, {}, {'loss': loss})
    checkpoints.wait()
  path = tmp_path / '2/meta/metadata'
  text = path.read_text()
  assert text.count('5.0') == 2
  path.write_text(text.replace('5.0', '1.0'))
  target = {'x': jnp.float32(0)}
  assert Checkpoints(tmp_path).restore_params(target, 'best')[0] == 1
  checkpoints.save(3, state, {}, {}, {'loss': 9.0})
  checkpoints.close()
  assert checkpoints.steps() == [1, 3]
  assert 'Step 2 of' in caplog.text
  assert 'meta/metadata was changed' in caplog.text


def test_scores_on_other_validation_data_do_not_count(tmp_path):
  target = {'x': jnp.float32(0)}
  checkpoints = Checkpoints(tmp_path, 1, 'loss')
  judged = (1, 'a', 1.0), (2, 'b', 5.0), (3, 'b', 7.0)
  for step, validation, loss in judged:
    x, about = {'x': jnp.float32(step)}, {'validation': validation}
    checkpoints.save(step, x, {}, about, {'loss': loss})
  checkpoints.close()
  assert checkpoints.steps() == [2, 3]
  assert Checkpoints(tmp_path).restore(target, 'best')[0] == 2


def test_scores_of_another_metric_do_not_count(tmp_path):
  """Also if no metric is given, as in `evaluate --step=best`."""
  target = {'x': jnp.float32(0)}
  for step, metric, best_is, value in (
    *((1, 'accuracy', 'highest', 0.5), (2, 'loss', 'lowest', 1.0)),
    (3, 'loss', 'lowest', 2.0),
  ):
    checkpoints = Checkpoints(tmp_path, 3, metric, best_is)
    checkpoints.save(step, target, {}, {}, {metric: value})
    checkpoints.close()
  assert Checkpoints(tmp_path).restore(target, 'best')[0] == 2


def evaluated_later(directory, metrics, step=20):
  """The newest step again, saved before and evaluated now."""
  checkpoints = Checkpoints(directory, 3, 'loss')
  data = {'offset': step + 1}
  assert checkpoints.save(step, make_state(step), data, ABOUT, metrics)
  checkpoints.close()


def test_two_steps_may_be_evaluated_later(run):
  evaluated_later(run, {'loss': 0.5})
  save_all(run, 30)
  evaluated_later(run, {'loss': 0.9}, 30)
  assert Checkpoints(run).restore(make_state(), 'best')[0] == 20
  assert Checkpoints(run).restore(make_state())[2] == {'offset': 31}


def test_a_step_evaluated_after_it_was_saved_is_not_rewritten(run):
  before = contents(run)
  evaluated_later(run, {'loss': 0.5})
  assert contents(run).keys() - before.keys() == {run / 'scores.json'}
  assert contents(run).items() >= before.items()
  params = make_state()['params']
  assert Checkpoints(run).restore_params(params, 'best')[0] == 20
  step, _, data, _ = Checkpoints(run).restore(make_state())
  assert (step, data) == (20, {'offset': 21})
  checkpoints = Checkpoints(run, 1, 'loss')
  metrics = {'loss': 0.25}
  assert not checkpoints.save(20, make_state(20), {}, ABOUT, metrics)
  checkpoints.save(30, make_state(30), {}, ABOUT, {'loss': 0.75})
  checkpoints.close()
  assert checkpoints.steps() == [20, 30]


def test_a_changed_file_of_scores_is_not_used(run, caplog):
  evaluated_later(run, {'loss': 0.5})
  whole = (run / 'scores.json').read_bytes()
  for position in range(0, len(whole), 50):
    flipped = bytearray(whole)
    flipped[position] ^= 1
    (run / 'scores.json').write_bytes(flipped)
    caplog.clear()
    assert Checkpoints(run).restore(make_state())[2] == {'offset': 20}
    assert 'scores.json is not used' in caplog.text


def test_a_score_belongs_to_one_state(run):
  """Another step 20 in the place of the one that was evaluated."""
  evaluated_later(run, {'loss': 0.5})
  shutil.rmtree(run / '20')
  checkpoints = Checkpoints(run, best_metric='loss')
  checkpoints.save(20, make_state(21), {'offset': 22}, ABOUT)
  checkpoints.close()
  assert checkpoints.restore(make_state())[2] == {'offset': 22}
  with pytest.raises(CheckpointError, match='no best step'):
    checkpoints.restore(make_state(), 'best')


def test_a_score_on_a_full_disk_stops_nothing(run, monkeypatch, caplog):
  monkeypatch.setattr(saved_step.output_file, 'write', full_disk)
  evaluated_later(run, {'loss': 0.5})
  assert 'its score was not saved (No space left' in caplog.text
  assert Checkpoints(run).restore(make_state())[0] == 20


def test_an_unknown_metric_is_an_error_and_none_is_not(tmp_path):
  checkpoints = Checkpoints(tmp_path, best_metric='loss')
  with pytest.raises(ValueError, match='Set best_metric'):
    checkpoints.save(1, {'x': jnp.float32(0)}, {}, {}, {'accuracy': 1.0})
  assert Best(None, 'lowest').score({'loss': 2.0}) is None
