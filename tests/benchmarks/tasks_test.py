"""The benchmark of tasks: what is run, the choice of a rate, the table."""

import json

import jax
import numpy as np
import pytest

from meliad_rec.benchmarks import tasks
from meliad_rec.commands import bench
from meliad_rec.config import config
from meliad_rec.models.cell import reading_block
from meliad_rec.models.model import initialize
from meliad_rec.report import journal
from meliad_rec.training.experiment import Experiment
from tests import command

# {rate: (validation accuracy, test accuracy) of each seed}.
FOUND = {
  ('lstm', 'parity'): {0.1: [(0.7, 0.9), (0.9, 0.5)], 0.2: [(1, 0.75), (1, 1)]},
  ('window', 'parity'): {0.1: [(0.6, 0.5), (0.8, 0.6)]},
  ('window', 's3'): {0.1: [(1.0, 1 / 6)]},
}


@pytest.fixture
def runs(tmp_path):
  """Runs with the results FOUND."""
  made = []
  for (arch, task), rates in FOUND.items():
    for rate, seeds in rates.items():
      for seed, (validation, test) in enumerate(seeds):
        run = tasks.TaskRun(arch, task, rate, seed, tmp_path)
        run.workdir.mkdir()
        out = journal.Journal(run.workdir / journal.NAME)
        for accuracy in 0.1, validation, 0.2:
          out.append({'step': 1, 'split': 'validation', 'accuracy': accuracy})
        out.append({'step': 1, 'split': 'train', 'accuracy': 1.0})
        out.close()
        for size in tasks.TASKS[task].sizes:
          # Shorter ones are easier.
          easier = 1 if size < tasks.TASKS[task].sizes[-1] else test
          run.metrics(size).write_text(json.dumps({'accuracy': easier}))
        made.append(run)
  return made


def test_the_rate_best_in_validation_counts_and_chance_is_0(runs):
  shown = tasks.show(runs)
  best = tasks.at_last_size(tasks.at_best_rate(shown.data))
  at = lambda arch, task: best.sel(arch=arch, task=task).values.tolist()
  assert at('lstm', 'parity') == [0.5, 1]  # The second rate.
  np.testing.assert_allclose(at('window', 'parity'), [0, 0.2], atol=1e-12)
  np.testing.assert_allclose(at('window', 's3'), [0, np.nan], atol=1e-12)
  assert np.isnan(at('lstm', 's3')).all()
  assert shown.data.validation.sel(
    arch='lstm', task='parity', rate=0.1
  ).values.tolist() == [0.7, 0.9]
  assert [text.get_text() for text in shown.figure.axes[0].texts] == [
    *('0.75', '', '0.10', '0.00')
  ]
  panels = tasks.draw_sizes(shown.data).axes
  assert [axes.get_title() for axes in panels] == ['parity', 's3']
  lstm, window = panels[0].lines
  assert lstm.get_xdata().tolist() == [64, 128, 256]
  np.testing.assert_allclose(lstm.get_ydata(), [1, 1, 0.75])
  np.testing.assert_allclose(window.get_ydata(), [1, 1, 0.1])
  lines = tasks.table(shown.data).splitlines()
  assert lines[3:7] == [
    '| | parity | s3 |',
    '|---|---:|---:|',
    '| lstm | 0.750 (1.000) |  |',
    '| window | 0.100 (0.200) | 0.000, 1 of 2 runs |',
  ]
  assert 'parity: test_256_last; s3: test_128_last' in lines[8]
  assert 'rates 0.1, 0.2,' in lines[10]
  assert lines[13:] == [
    *('| | parity | s3 |', '|---|---:|---:|'),
    '| lstm | 0.800, 1.000 | 0.000, 0.000 |',
    '| window | 0.700, 0.000 | 0.500, 0.000 |',
  ]
  one_rate = tasks.table(shown.data.sel(rate=[0.1]))
  assert 'rates' not in one_rate


def test_a_run_that_failed_counts_against_its_rate(runs, monkeypatch):
  """The survivor at 0.2 is perfect, but both runs at 0.1 have ended."""
  failed = next(r for r in runs if (r.rate, r.seed) == (0.2, 0))
  failed.metrics(256).unlink()
  data = tasks.show(runs).data.sel(arch=['lstm'], task=['parity'])
  assert np.isnan(data.validation.sel(rate=0.2)).values.ravel().tolist() == [
    *(True, False)
  ]
  best = tasks.at_last_size(tasks.at_best_rate(data))
  np.testing.assert_allclose(best.values.ravel(), [0.8, 0], atol=1e-12)
  assert '| lstm | 0.400 (0.800) |' in tasks.table(data)
  monkeypatch.setattr(tasks, 'work', lambda runs, jobs: {failed.name: 3})
  out = failed.out
  arguments = ['lstm'], ['parity'], [0.1, 0.2]
  assert tasks.measure(out, *arguments, seeds=2, jobs=1) == 1
  text = (out / 'tasks.md').read_text()
  assert text.startswith(tasks.table(data))
  assert text.endswith(f'These runs failed: {failed.name}.\n')


@pytest.mark.parametrize('task', tasks.TASKS)
@pytest.mark.parametrize('arch', tasks.ARCHS)
def test_every_pair_is_an_experiment_and_every_test_split_exists(
  arch, task, tmp_path
):
  run = tasks.TaskRun(arch, task, 0.003, 1, tmp_path)
  train, *evaluations = run.commands()
  values = lambda name: [
    part.removeprefix(f'--{name}=')
    for part in train
    if part.startswith(f'--{name}=')
  ]
  config.parse(values('gin_file'), values('gin_param'))
  experiment = config.build(Experiment)()
  model = experiment.model(experiment.data.vocabulary.size)
  assert experiment.segment % reading_block(model.cell, experiment.segment) == 0
  if task == 'parity':  # Others differ in vocabulary and segment only.
    make = lambda rng: initialize(model, rng, 1, experiment.segment)
    assert jax.eval_shape(make, jax.random.key(0))
    config.check_read()
  wanted = tasks.TASKS[task]
  assert experiment.segment == wanted.segment and experiment.seed == 1
  for size, evaluate in zip(wanted.sizes, evaluations, strict=True):
    split = wanted.split.format(size)
    assert f'--split={split}' in evaluate
    assert split in experiment.data.splits
  config.reset()


def test_settings_of_a_user_override_those_of_a_task(tmp_path):
  params = 'WINDOW = 128', "KEYS = 'a/b'"
  run = tasks.TaskRun('window', 'recall', 0.003, 1, tmp_path, params=params)
  train, *_ = run.commands()
  assert train[-2:] == [f'--gin_param={each}' for each in params]
  # Runs with other settings have folders of their own.
  assert run.name == 'recall_window_rate0.003_seed1_WINDOW=128_KEYS=ab'


def test_tests_are_as_long_and_as_hard_as_they_are_said_to_be(tmp_path):
  for name, task in tasks.TASKS.items():
    few = ['TEST_SEQUENCES = 20', 'SEQUENCES = 200']
    few.append(f'TEST_SIZES = {task.sizes}')
    config.parse(['arch/lstm', 'size/walk', task.file], [*task.settings, *few])
    data = config.build(Experiment)().data
    split = task.split.format(task.sizes[-1])
    longest = data.documents(split).lengths.max()
    assert longest <= task.longest < 1.1 * longest + 8, name
    assert data.documents('train').lengths.max() <= task.segment, name
    assert abs(data.guess() - (1 - task.guess)) < 1e-9, name
  config.reset()


def test_mistakes_are_sentences(tmp_path):
  say = lambda *flags: command.mistake(bench, 'tasks', *flags)
  assert '--out=DIR' in say()
  out = f'--out={tmp_path}'
  assert "no task 'parityy' (nearest is parity)" in say(out, '--tasks=parityy')
  assert "no arch 'x'" in say(out, '--archs=x')
  for rates in 'a', '1000':
    told = f'--rates={rates} must be numbers above 0 and below 1000'
    assert told in say(out, f'--rates={rates}')
  assert 'Remove --rounds' in say(out, '--rounds=3')
  assert 'Remove --out' in command.mistake(bench, 'step', out)


@pytest.mark.slow
def test_it_trains_tests_and_repeats_nothing(tmp_path, capfd):
  arguments = 'tasks', f'--out={tmp_path}', '--tasks=parity', '--steps=2'
  arguments += '--archs=lstm,universal', '--rates=0.01', '--jobs=2'
  assert command.run(bench, *arguments) == 0
  written = {path.name for path in tmp_path.iterdir() if path.is_file()}
  assert written >= {'tasks.md', 'tasks.csv', 'tasks.png', 'sizes.png'}
  assert '| universal |' in (tmp_path / 'tasks.md').read_text()
  capfd.readouterr()
  assert command.run(bench, *arguments) == 0
  assert ': train' not in capfd.readouterr().out
