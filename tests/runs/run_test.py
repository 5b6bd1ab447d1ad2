"""A run read back from its folder alone."""

import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import meliad_rec
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
  """The run's folder, to be spoilt."""
  return shutil.copytree(trained.folder(), tmp_path / 'run')


def test_the_package_offers_it_without_importing_jax():
  assert meliad_rec.load_run is load_run
  code = 'import meliad_rec, sys; assert "jax" not in sys.modules'
  subprocess.run([sys.executable, '-c', code], check=True)
  with pytest.raises(AttributeError, match='load_ran'):
    _ = meliad_rec.load_ran


def test_parameters_are_the_average_of_the_step(run):
  assert run.step == trained.STEPS
  checkpoints = Checkpoints(trained.folder() / 'checkpoints')
  shapes = run.forward.param_shapes
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
  with pytest.raises(ValueError, match=r'no step 3, but \[2, 4\]'):
    load_run(trained.folder(), 3)


def test_generate_is_stream_and_goes_by_the_seed(run):
  text = run.generate(TEXT, 21, seed=3)[0]
  assert text == ''.join(run.stream(TEXT, 21, seed=3))
  assert text == run.generate(TEXT, 21, seed=3, samples=2)[0]
  assert text != run.generate(TEXT, 21, seed=4)[0]
  first, second = run.generate('', 21, samples=2)
  assert first != second
  assert run.generate('x', 0) == ['']


def test_a_state_loaded_goes_on_as_if_never_stopped(run, tmp_path):
  sampler = Sampler(top_k=40)

  def write(reading, tokens):
    text = ''
    for step in run.writer.write(reading, tokens, sampler, seed=5):
      reading, (piece,) = step
      text += piece
    return reading, text

  _, whole = write(run.read(TEXT), 30)
  middle, before = write(run.read(TEXT[11:], run.read(TEXT[:11])), 13)
  run.save_reading(tmp_path / 'state.npz', middle)
  again = load_run(trained.folder())
  _, after = write(again.load_reading(tmp_path / 'state.npz'), 17)
  # A character that was cut is whole in one text and twice marked in the other.
  strip = lambda text: text.replace('\ufffd', '')
  assert strip(before + after) == strip(whole)


def test_evaluate_is_the_sum_of_nats(run):
  nats_T, bytes_T = run.nats(TEXT)
  assert bytes_T.tolist() == list(range(len(TEXT.encode())))
  figures = run.evaluate([TEXT, TEXT])
  assert figures['tokens'] == 2 * len(nats_T)
  np.testing.assert_allclose(
    figures['loss_nats_per_token'], nats_T.mean(), rtol=1e-5
  )
  one = run.evaluate(TEXT)
  np.testing.assert_allclose(
    one['bits_per_byte'], figures['bits_per_byte'], rtol=1e-5
  )


def test_nats_end_where_a_text_is_cut(run):
  """They are of a causal model: what follows changes none of them."""
  whole, _ = run.nats(TEXT)
  part, _ = run.nats(TEXT[:5])
  np.testing.assert_allclose(part, whole[:5], rtol=1e-4)


def test_a_run_of_labels_has_nothing_to_do_with_text(copy):
  facts = json.loads((copy / folder.FACTS).read_text())
  (copy / folder.FACTS).write_text(json.dumps(facts | {'labels': True}))
  run = load_run(copy)
  for use in run.generate, run.evaluate, run.nats, run.read:
    with pytest.raises(ValueError, match='^This run was trained to label tok'):
      use(TEXT)


def test_nothing_to_evaluate(run):
  with pytest.raises(ValueError, match='Nothing to read'):
    run.evaluate('')


def test_a_foreign_configuration_runs_no_code(copy, monkeypatch):
  called = []
  monkeypatch.setattr(os, 'system', called.append)
  file = copy / folder.CONFIG
  text = file.read_text()
  evil = 'import os\nmodel.Model.cell = @os.system()\n'
  evil += "os.system.command = 'x'\n"
  file.write_text(text.replace('model.Model.cell = ', 'CELL = ') + evil)
  with pytest.raises(ValueError, match=r'calls os.system, which is no part'):
    load_run(copy)
  assert called == []


def test_a_vocabulary_that_leads_out_is_refused(copy, tmp_path):
  (tmp_path / 'secret').write_text('x')
  (copy / 'vocabulary.model').symlink_to(tmp_path / 'secret')
  with pytest.raises(ValueError, match='leads out of the folder'):
    load_run(copy)


@pytest.mark.parametrize(
  ('spoil', 'told'),
  [
    (lambda f: (f / 'config.gin').unlink(), 'not the folder of a run'),
    (lambda f: (f / 'run.json').write_text('{}'), 'run.json is damaged'),
    (lambda f: shutil.rmtree(f / 'checkpoints'), 'holds no checkpoint'),
    (
      lambda f: (f / 'config.gin').write_text('x = '),
      'config.gin:.* not gin',
    ),
  ],
)
def test_mistakes(copy, spoil, told):
  spoil(copy)
  with pytest.raises(ValueError, match=told):
    load_run(copy)
