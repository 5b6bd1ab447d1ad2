"""A run opened from its folder."""

import json
import os
import shutil

import jax
import numpy as np
import pytest

from meliad_rec.generation.sampling import Sampler
from meliad_rec.runs import folder
from meliad_rec.runs.trained_run import load_run
from meliad_rec.storage.checkpoints import Checkpoints
from tests import trained

TEXT = 'The wörd, and then\nthe word again; \u20ac.'


@pytest.fixture(scope='module')
def run():
  return load_run(trained.folder())


@pytest.fixture
def copy(tmp_path):
  """A copy of the run's folder, to be damaged."""
  return shutil.copytree(trained.folder(), tmp_path / 'run')


def test_parameters_are_the_average_of_the_step(run):
  assert run.step == trained.STEPS
  checkpoints = Checkpoints(trained.folder() / 'checkpoints')
  shapes = run.sharded.param_shapes
  *_, ema, _ = checkpoints.restore_params(shapes, part='ema')
  *_, plain, _ = checkpoints.restore_params(shapes)
  same = lambda a, b: all(
    jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))
  )
  assert same(run.params, ema)
  assert not same(run.params, plain)


def test_steps_are_chosen():
  assert load_run(trained.folder(), 2).step == 2
  assert load_run(trained.folder(), 'best').step == trained.STEPS
  with pytest.raises(ValueError, match='step 3'):
    load_run(trained.folder(), 3)


def test_generate_equals_stream_and_depends_on_the_seed(run):
  text = run.generate(TEXT, 21, seed=3)[0]
  assert text == ''.join(run.stream(TEXT, 21, seed=3))
  assert text == run.generate(TEXT, 21, seed=3, samples=2)[0]
  assert text != run.generate(TEXT, 21, seed=4)[0]
  first, second = run.generate('', 21, samples=2)
  assert first != second
  assert run.generate('x', 0) == ['']


def test_a_loaded_state_continues_the_text(run, tmp_path):
  sampler = Sampler(top_k=40)

  def write(state, tokens):
    text = ''
    for step in run.text_generator.write(state, tokens, sampler, seed=5):
      state, (piece,) = step
      text += piece
    return state, text

  _, whole = write(run.read(TEXT), 30)
  middle, before = write(run.read(TEXT[11:], run.read(TEXT[:11])), 13)
  run.save_state(tmp_path / 'state.npz', middle)
  again = load_run(trained.folder())
  _, after = write(again.load_state(tmp_path / 'state.npz'), 17)
  # A cut character is complete in one text and marked twice in the other.
  strip = lambda text: text.replace('\ufffd', '')
  assert strip(before + after) == strip(whole)


def test_evaluate_is_the_sum_of_nats(run):
  nats_T, bytes_T = run.nats(TEXT)
  assert bytes_T.tolist() == list(range(len(TEXT.encode())))
  both = run.evaluate([TEXT, TEXT])
  assert both['tokens'] == 2 * len(nats_T)
  np.testing.assert_allclose(
    both['loss_nats_per_token'], nats_T.mean(), rtol=1e-5
  )
  one = run.evaluate(TEXT)
  np.testing.assert_allclose(
    one['bits_per_byte'], both['bits_per_byte'], rtol=1e-5
  )


def test_nats_end_where_a_text_is_cut(run):
  """The model is causal, so the rest of a text does not change them."""
  whole, _ = run.nats(TEXT)
  part, _ = run.nats(TEXT[:5])
  np.testing.assert_allclose(part, whole[:5], rtol=1e-4)


def test_a_run_that_predicts_labels_takes_no_text(copy):
  facts = json.loads((copy / folder.FACTS).read_text())
  (copy / folder.FACTS).write_text(json.dumps(facts | {'labels': True}))
  run = load_run(copy)
  for use in run.generate, run.evaluate, run.nats, run.read:
    with pytest.raises(ValueError, match='predict labels'):
      use(TEXT)


def test_nothing_to_evaluate(run):
  with pytest.raises(ValueError, match='Nothing'):
    run.evaluate('')


def test_a_foreign_configuration_runs_no_code(copy, monkeypatch):
  called = []
  monkeypatch.setattr(os, 'system', called.append)
  file = copy / folder.CONFIG
  text = file.read_text()
  evil = 'import os\nmodel.Model.cell = @os.system()\n'
  evil += "os.system.command = 'x'\n"
  file.write_text(text.replace('model.Model.cell = ', 'CELL = ') + evil)
  with pytest.raises(ValueError, match='os.system'):
    load_run(copy)
  assert called == []


def test_a_vocabulary_outside_the_folder_is_an_error(copy, tmp_path):
  (tmp_path / 'secret').write_text('x')
  (copy / 'vocabulary.model').symlink_to(tmp_path / 'secret')
  with pytest.raises(ValueError, match='vocabulary.model is a link'):
    load_run(copy)


@pytest.mark.parametrize(
  ('damage', 'expected'),
  [
    (lambda f: (f / 'config.gin').unlink(), 'config.gin'),
    (lambda f: (f / 'run.json').write_text('{}'), 'run.json'),
    (lambda f: shutil.rmtree(f / 'checkpoints'), 'no checkpoint'),
    (
      lambda f: (f / 'config.gin').write_text('x = '),
      'config.gin',
    ),
  ],
)
def test_damaged_folders(copy, damage, expected):
  damage(copy)
  with pytest.raises(ValueError, match=expected):
    load_run(copy)
