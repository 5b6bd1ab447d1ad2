"""meliad_rec.train: it trains, stops, resumes and refuses mistakes."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest

import meliad_rec
from meliad_rec.config import config
from meliad_rec.data.synthetic.recall import Recall
from meliad_rec.runs.training import train
from meliad_rec.training.experiment import Experiment

FILES = ['arch/block_recurrent', 'size/test', 'task/recall']
PARAMS = ['STEPS = 4', 'SAVE_EVERY = 2', 'SAMPLE = 0', 'BATCH = 8']
PARAMS += ['EVAL_DOCUMENTS = 8', 'recall.Recall.documents_in_train = 80']


@pytest.mark.slow
def test_a_run_stops_and_goes_on_as_if_it_had_not(tmp_path):
  first = train(FILES, PARAMS, tmp_path / 'cut', stop_at=2)
  assert first.step == 2
  cut = train(FILES, PARAMS, tmp_path / 'cut')
  whole = train(FILES, PARAMS, tmp_path / 'whole', stop_at=100)
  assert (cut.step, whole.step) == (4, 4)
  jax.tree.map(np.testing.assert_array_equal, cut.params, whole.params)
  pairs = zip(*map(jax.tree.leaves, (first.params, cut.params)), strict=True)
  assert any(np.any(a != b) for a, b in pairs)
  assert 'bits_per_byte' in cut.evaluate(Recall().text('ABCD'))


def test_a_run_may_stop_while_its_segments_are_short():
  files = [*FILES, 'options/data/shorter_first']
  params = [*PARAMS, 'FIRST_SEGMENT = 6', 'FIRST_STEPS = 3']
  config.parse(files, params)
  stopped = dataclasses.replace(config.build(Experiment)(), stop_at=2)
  assert (stopped.last_step, stopped.steps) == (2, 4)


@pytest.mark.slow
def test_a_run_begins_with_the_parameters_of_another(tmp_path):
  first = train(FILES, PARAMS, tmp_path / 'a', stop_at=2)
  still = [*PARAMS, 'LEARNING_RATE = 1e-9']
  second = train(FILES, still, tmp_path / 'b', init_from=tmp_path / 'a')
  close = functools.partial(np.testing.assert_allclose, atol=1e-6)
  jax.tree.map(close, first.params, second.params)


@pytest.mark.parametrize(
  ('files', 'params', 'options', 'message'),
  [
    ('arch/window', PARAMS, {}, 'gin_files must be a list of strings, got'),
    (FILES, 'STEPS = 4', {}, 'gin_params must be a list of strings, got'),
    (FILES, [*PARAMS, 'STEP = 4'], {}, 'STEPS'),
    (FILES[:2], PARAMS, {}, 'task/'),
    (FILES, PARAMS, {'stop_at': 0}, 'stop_at must be'),
    (FILES, PARAMS, {'init_from': 'nowhere'}, 'nowhere'),
    ([Path('arch/windo'), *FILES[1:]], PARAMS, {}, 'arch/windo'),
  ],
)
def test_mistakes(tmp_path, files, params, options, message):
  with pytest.raises(ValueError, match=message):
    meliad_rec.train(files, params, tmp_path / 'run', **options)
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  'take',
  [
    lambda workdir: meliad_rec.train(FILES, PARAMS, workdir),
    meliad_rec.load_run,
    meliad_rec.load_agent,
  ],
)
def test_a_folder_is_a_path(take):
  with pytest.raises(ValueError, match='workdir must be a str or a path'):
    take(None)
