"""Runs of agents: they resume bit for bit, and learn to remember."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.config import config
from meliad_rec.distributed.partition import make_mesh
from meliad_rec.reinforcement import a2c
from meliad_rec.reinforcement.corridor import Corridor
from meliad_rec.report import journal
from meliad_rec.runs import folder
from meliad_rec.runs import training
from meliad_rec.runs.agent_run import load_agent
from meliad_rec.runs.trained_run import load_run
from meliad_rec.storage.checksums import digest
from meliad_rec.training import summary
from meliad_rec.training.agent_program import _sums
from meliad_rec.training.components import build_components
from meliad_rec.training.experiment import Experiment

FILES = ['arch/feedback', 'size/corridor', 'task/corridor']
TINY = [
  *('BATCH = 8', 'SEGMENT = 4', 'LENGTH = 2', 'EVAL_DOCUMENTS = 5'),
  *('STEPS = 6', 'EVAL_EVERY = 3', 'SAVE_EVERY = 2', 'LOG_EVERY = 2'),
]


def lived(workdir, params=TINY, stop_at=None, devices=8):
  """Trains a run, and returns it."""
  config.parse(FILES, list(params))
  mesh = functools.partial(make_mesh, devices=jax.devices()[:devices])
  experiment = config.build(Experiment)(mesh=mesh)
  _ = experiment.program.shapes
  config.check_read()
  experiment = dataclasses.replace(experiment, stop_at=stop_at)
  return training.run_experiment(experiment, workdir)[0]


@pytest.mark.slow
@pytest.mark.parametrize('agents', [1, 2])
def test_a_stopped_run_ends_as_one_that_was_never_stopped(tmp_path, agents):
  """Its parameters, moments, environments, memory and random numbers."""
  params = [*TINY, f'AGENTS = {agents}']
  whole = lived(tmp_path / 'whole', params=params)
  lived(tmp_path / 'parts', params=params, stop_at=2)
  resumed = lived(tmp_path / 'parts', params=params)
  assert digest(resumed.state) == digest(whole.state)
  assert (
    resumed.position == whole.position == {'step': 6, 'tokens': 192 * agents}
  )
  opened = load_agent(tmp_path / 'whole', index=agents - 1)
  of_last = lambda a: a[-1] if agents > 1 else a
  expected = jax.tree.map(of_last, whole.state.params)
  assert digest(opened.params) == digest(expected)
  read = lambda name: [
    {k: v for k, v in each.items() if 'second' not in k and k != 'time'}
    for each in journal.read(journal.path(tmp_path / name))
    if each.get('split') == 'validation' and each['step'] > 2
  ]
  assert read('parts')[-1] == read('whole')[-1]
  assert np.isfinite(read('whole')[-1]['mean_return'])
  facts = json.loads((tmp_path / 'whole' / 'run.json').read_text())
  assert facts['vocabulary'] == 'environment Corridor(length=2)'
  with pytest.raises(ValueError, match='meliad-rec play'):
    load_run(tmp_path / 'whole')
  with pytest.raises(ValueError, match=r'environment Corridor\(length=2\)'):
    lived(tmp_path / 'whole', params=[*params, 'LENGTH = 3', 'STEPS = 9'])


def test_the_summary_counts_the_steps_of_all_agents(capsys, monkeypatch):
  config.parse(['arch/lstm', *FILES[1:]], [*TINY, 'AGENTS = 3', 'LAYERS = 1'])
  experiment = config.build(Experiment)()
  monkeypatch.setattr(summary, 'memory', lambda _: '')  # It compiles.
  summary.show(experiment)
  assert '6 steps of 3 x 8 x 4 = 96 tokens' in capsys.readouterr().out
  assert summary.sentence(experiment).endswith('6 steps of 3 x 8 x 4 tokens.')


def test_figures_of_training_are_of_ended_episodes():
  numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
  done = np.array([[True, False, False], [False, True, False]])
  steps = a2c.Transitions(
    *(None, None, None, None, numbers / 10, None, numbers, done),
    *(numbers * 3 - 6, None),
  )
  sums = _sums(steps, np.float32(12))
  assert (int(sums.tokens), float(sums.nats)) == (6, 12)
  means = {name: float(m.total / m.count) for name, m in sums.sown.items()}
  # Returns -6 and 6 of the episodes that end.
  expected = {'mean_return': 0, 'success': 0.5, 'reward': 2.5, 'entropy': 0.25}
  assert means == pytest.approx(expected)


def test_each_step_has_its_own_random_numbers():
  config.parse(['arch/lstm', *FILES[1:]], [*TINY, 'LAYERS = 1'])
  program = config.build(Experiment)().program
  state = program.create(1)
  batch = program.put(None, program.rows)
  after = [
    jax.device_get(program.train_step(each, batch)[0].carry)
    for each in (
      jax.tree.map(jnp.copy, state),
      state.replace(step=state.step + 1),
    )
  ]
  assert digest(after[0]) != digest(after[1])


def test_runs_with_other_seeds_have_other_agents():
  config.parse(['arch/lstm', *FILES[1:]], [*TINY, 'AGENTS = 3', 'LAYERS = 1'])
  program = config.build(Experiment)().program
  seeds = [program.each(np.uint32(seed)).tolist() for seed in range(4)]
  assert seeds[0] == [0, 1, 2]
  assert len(set(sum(seeds, []))) == 12


def test_each_agent_of_a_run_is_opened(tmp_path, monkeypatch):
  files = ['arch/lstm', *FILES[1:]]
  config.parse(files, [*TINY, 'AGENTS = 2', 'LAYERS = 1'])
  experiment = config.build(Experiment)()
  both = experiment.program.shapes.params
  both = jax.tree.map(lambda a: np.random.normal(size=a.shape), both)
  folder.write(tmp_path, experiment, config.operative())

  def read(place, facts, target, step):
    assert jax.tree.map(np.shape, both) == jax.tree.map(np.shape, target)
    return step, both, {}

  monkeypatch.setattr(folder, 'read_params', read)
  for number in 0, 1:
    found = load_agent(tmp_path, 7, index=number)
    expected = jax.tree.map(lambda a, n=number: a[n], both)
    jax.tree.map(np.testing.assert_array_equal, found.params, expected)
    assert (found.step, found.env) == (7, Corridor(2))
  with pytest.raises(ValueError, match='numbers 0 to 1, got 2'):
    load_agent(tmp_path, index=2)


def test_settings_of_text_are_refused():
  for param in (
    *('SAMPLE = 5', 'EVAL_TOKENS = 3', 'HALT_WARMUP = 2'),
    'experiment.Experiment.buckets = 2',
  ):
    config.parse(FILES, [*TINY, param])
    experiment = config.build(Experiment)()
    name = param.split()[0].rpartition('.')[2].upper()
    with pytest.raises(ValueError, match=name):
      build_components(experiment)


@pytest.mark.parametrize(
  ('files', 'params', 'message'),
  [
    ([], ['DROPOUT = 0.1'], 'DROPOUT'),
    ([], ['LAYER_DROP = 0.1'], 'LAYER_DROP'),
    (['options/layer/dropout_inside'], ['DROPOUT = 0.1'], 'dropout'),
    (['options/layer/adaptive_span'], [], 'a loss of its own'),
    (['options/embedding/untied'], [], 'model.Model.embedding'),
    (
      [],
      ['model.Model.encoder_norm = @meliad_rec.layers.norms.NoNorm'],
      'encoder_norm',
    ),
  ],
)
def test_parts_that_agents_lack_are_refused(files, params, message):
  config.parse([*FILES, *files], [*TINY, *params])
  with pytest.raises(ValueError, match=message):
    _ = config.build(Experiment)().program.shapes


@pytest.mark.slow
def test_agents_learn_the_corridor_and_each_has_its_own_seed(tmp_path):
  run = lived(tmp_path, params=['AGENTS = 2', 'STEPS = 600'], devices=1)
  records = journal.read(journal.path(tmp_path))
  last = [each for each in records if each.get('split') == 'validation'][-1]
  assert last['success'] > 0.97
  assert last['mean_return_0'] > 0.95 and last['mean_return_1'] > 0.95
  one, other = (
    [a[i] for a in jax.tree.leaves(run.state.params)] for i in (0, 1)
  )
  assert any((a != b).any() for a, b in zip(one, other, strict=True))
