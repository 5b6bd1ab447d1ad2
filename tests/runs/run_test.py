"""A run opened from its folder."""

import json
import os
import shutil

import numpy as np
import pytest

from meliad_rec.generation.sampling import Sampler
from meliad_rec.runs import folder
from meliad_rec.runs.trained_run import load_run
from meliad_rec.storage.checkpoints import Checkpoints
from meliad_rec.storage.checksums import digest
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
  assert digest(run.params) == digest(ema) != digest(plain)


def test_steps_are_chosen():
  assert load_run(trained.folder(), 2).step == 2
  assert load_run(trained.folder(), 'best').step == trained.STEPS
  with pytest.raises(ValueError, match='step 3'):
    load_run(trained.folder(), 3)


def test_generate_equals_stream_and_depends_on_the_seed(run):
  first, second = run.generate('The', 21, seed=3, samples=2)
  assert first == ''.join(run.stream('The', 21, seed=3))
  assert first != second
  assert first != run.generate('The', 21, seed=4, samples=2)[0]
  assert run.generate('x', 0) == ['']


def test_a_loaded_state_continues_the_text(run, tmp_path):
  def write(state, tokens):
    text = ''
    for step in run.text_generator.write(state, tokens, Sampler(0.8), seed=5):
      state, (piece,) = step
      text += piece
    return state, text

  _, whole = write(run.read('The wö'), 30)
  middle, before = write(run.read('wö', run.read('The ')), 13)
  run.save_state(tmp_path / 'state.npz', middle)
  _, after = write(run.load_state(tmp_path / 'state.npz'), 17)
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
  # The model is causal, so the rest of a text does not change them.
  part, _ = run.nats(TEXT[:5])
  np.testing.assert_allclose(part, nats_T[:5], rtol=1e-4)
  with pytest.raises(ValueError, match='Nothing'):
    run.evaluate('')


def test_evaluate_reads_a_split(run):
  data = run.data(store=str(trained.store()))
  split = data.documents('validation').head(2, 20, run.vocabulary)
  texts = [run.vocabulary.decode(ids) for ids in split]
  assert run.evaluate(split) == run.evaluate(texts)


def test_a_run_that_predicts_labels_takes_no_text(copy):
  facts = json.loads((copy / folder.FACTS).read_text())
  (copy / folder.FACTS).write_text(json.dumps(facts | {'labels': True}))
  run = load_run(copy)
  for use in run.generate, run.evaluate, run.nats, run.read:
    with pytest.raises(ValueError, match='predicts? labels'):
      use(TEXT)


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


def test_damaged_folders(copy):
  (copy / 'config.gin').write_text('x = ')
  with pytest.raises(ValueError, match='config.gin'):
    load_run(copy)
  shutil.copy(trained.folder() / 'config.gin', copy)
  shutil.rmtree(copy / 'checkpoints')
  with pytest.raises(ValueError, match='no checkpoint'):
    load_run(copy)
