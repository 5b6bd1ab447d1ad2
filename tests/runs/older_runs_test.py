"""Runs of version 0.1.0 load, evaluate, generate and resume.

`runs_0.1.0.tar.xz` has two runs of 4 steps of that version, each made by

  python -m meliad_rec.main --gin_file=size/test --gin_param='STEPS=4' ...

with arch/block_recurrent and task/recall, and with arch/gated_latent_bottleneck
and task/flip_flop. The expected values are those that 0.1.0 reported.
"""

import functools
from pathlib import Path
import shutil
import tarfile

import jax
import numpy as np
import pytest

from meliad_rec.config import config
from meliad_rec.config.saved import DATA
from meliad_rec.distributed.partition import make_mesh
from meliad_rec.evaluation.evaluation import evaluate
from meliad_rec.runs.trained_run import load_run
from meliad_rec.training import trainer
from meliad_rec.training.experiment import Experiment

ARCHIVE = Path(__file__).with_name('runs_0.1.0.tar.xz')
# Validation loss in nats per token at step 4; training losses at steps 5, 6.
LOSSES = {
  'block_recurrent': (5.800624944269657, 5.50901730855306, 5.3321278889973955),
  'gated_latent_bottleneck': (
    0.515120614142645,
    0.2222772240638733,
    0.2392247517903646,
  ),
}

SLOW = pytest.param('gated_latent_bottleneck', marks=pytest.mark.slow)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """The folder of the unpacked runs."""
  path = tmp_path_factory.mktemp('older')
  # Python before 3.11.4 has no filters.
  options = {'filter': 'data'} if hasattr(tarfile, 'data_filter') else {}
  with tarfile.open(ARCHIVE) as archive:
    archive.extractall(path, **options)
  return path


@pytest.mark.slow
@pytest.mark.parametrize('name', ['block_recurrent', 'gated_latent_bottleneck'])
def test_an_older_run_evaluates_as_it_did_and_generates(folder, name):
  run = load_run(folder / f'run_{name}')
  data = run.config.argument(Experiment, 'data', DATA)
  documents = data.documents('validation').head(2, None, run.vocabulary)
  found = evaluate(run.sharded, run.params, documents, run.rows(2))
  np.testing.assert_allclose(
    found['loss_nats_per_token'], LOSSES[name][0], rtol=1e-5
  )
  if not run.labels:
    (text,) = run.generate('name:ABC', tokens=24, temperature=0)
    assert text == 'J' * 24


@pytest.mark.parametrize('name', ['block_recurrent', SLOW])
def test_an_older_run_resumes(folder, name):
  shutil.copytree(folder / f'run_{name}', folder / f'resumed_{name}')
  config.parse([str(folder / f'run_{name}/config.gin')], ['STEPS = 6'])
  one_device = functools.partial(make_mesh, devices=jax.devices()[:1])
  experiment = config.build(Experiment)(mesh=one_device)
  _ = experiment.program.shapes
  config.check_read()
  operative = config.operative()
  before = (folder / f'run_{name}/config.gin').read_text()
  assert config.differences(before, operative) == ['STEPS was 4 and is 6']
  config.reset()
  run = trainer.Run(experiment, str(folder / f'resumed_{name}'), {})
  run.begin()
  assert run.step == 4
  for expected in LOSSES[name][1:]:
    run.train(run.lanes)
    sums = jax.device_get(run.unread[-1])
    np.testing.assert_allclose(sums.nats / sums.scored, expected, rtol=1e-5)
  run.batch = None  # Its loss after the update is not asked for.
  run.save(None)
  run.checkpoints.close()
  run.report.close()
  run.lock.release()
  assert run.checkpoints.steps() == [4, 6]
