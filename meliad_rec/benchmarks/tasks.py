r"""Architectures on tasks that need a memory: one table, one figure.

Each architecture is trained on each task with each learning rate and seed. The
rate with the best validation accuracy counts. Tests are at greater sizes than
training, except for `automaton`, whose rules are new. Scaled accuracy is 1 if
everything is right, and 0 for a uniform guess; a better guess reaches 0.23 on
`automaton`, the more frequent state of the last ring, and 0.12 on `brackets`.

All have about 0.1 M parameters (gin/size/walk). `window` and the recurrent ones
attend to at most 16 tokens back; `universal` reads the whole sequence.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meliad_rec.config.files import nearest
from meliad_rec.explore.shown import heat_map
from meliad_rec.explore.shown import Shown
from meliad_rec.report import journal
from meliad_rec.report.plot import new_figure
from meliad_rec.runs.queue import work

if TYPE_CHECKING:
  import xarray as xr

# The published start of the position bias, as in experiments/cpu.
_RANDOM_TABLE = 'options/position/t5_random'
# {architecture: (gin files, settings)}.
ARCHS = {
  'lstm': (['arch/lstm'], []),
  'window': (['arch/window', _RANDOM_TABLE], []),
  'block_recurrent': (['arch/block_recurrent', _RANDOM_TABLE], []),
  'feedback': (['arch/feedback', _RANDOM_TABLE], []),
  'staircase': (['arch/staircase', _RANDOM_TABLE], ['PASSES = 4']),
  'recurrent_memory': (['arch/recurrent_memory', _RANDOM_TABLE], []),
  'universal': (['arch/universal'], ['BLOCK = None', 'DEPTH = 6']),
  'latent_bottleneck': (['arch/latent_bottleneck'], []),
}
# Architectures that read a document at once, so tests need longer segments.
_WHOLE = 'universal'


@dataclasses.dataclass(frozen=True)
class Task:
  """A task of the benchmark.

  Attributes:
    file: its gin file.
    settings: its settings, as in --gin_param.
    steps: number of training steps.
    segment: tokens of a training sequence, at most.
    split: the test split.
    longest: tokens of a sequence of the test split.
    guess: accuracy of a random guess.
  """

  file: str
  settings: tuple[str, ...]
  steps: int
  segment: int
  split: str
  longest: int
  guess: float


def _problem(group: str, order: int, steps: int, most: int, test: int) -> Task:
  sizes = f'MAX_SIZE = {most}', f'TEST_SIZES = ({test},)'
  return Task(
    *('task/word_problem', (f"GROUP = '{group}'", *sizes), steps, most),
    *(f'test_{test}_last', test, 1 / order),
  )


def _recall(rewrites: float) -> Task:
  settings = 'KEYS = 64', 'VALUES = 64', 'MAX_SIZE = 16', 'TEST_SIZES = (32,)'
  return Task(
    *('task/associative_recall', (*settings, f'REWRITES = {rewrites}')),
    *(5000, 128, 'test_32', 256, 1 / 64),
  )


TASKS = {
  'parity': _problem('Z2', 2, 3000, 40, 256),
  's3': _problem('S3', 6, 3000, 32, 128),
  'a5': _problem('A5', 60, 5000, 32, 128),
  's5': _problem('S5', 120, 5000, 32, 128),
  'arithmetic': Task(
    *('task/arithmetic', ('TEST_SIZES = (64,)',), 5000, 40),
    *('test_64', 128, 1 / 5),
  ),
  'brackets': Task(
    *('task/arithmetic', ('BRACKETS = True', 'TEST_SIZES = (64,)'), 5000, 80),
    *('test_64', 254, 1 / 5),
  ),
  'recall': _recall(0.0),
  'rewrites': _recall(0.5),
  'automaton': Task(
    *(
      'task/cellular_automaton',
      ('CELLS = 11', 'MIN_SIZE = 2', 'MAX_SIZE = 2'),
    ),
    *(5000, 136, 'test', 131, 1 / 2),
  ),
  'needle': Task(
    *('task/needle', ('MAX_SIZE = 256', 'TEST_SIZES = (4096,)', 'DIGITS = 2')),
    *(3000, 256, 'test_4096', 4096, 1 / 10),
  ),
}


@dataclasses.dataclass(frozen=True)
class TaskRun:
  """One training run: an architecture on a task.

  Attributes:
    arch, task: names in ARCHS and TASKS.
    rate: peak learning rate.
    seed: the seed.
    out: folder of the table.
    steps: number of training steps; None: as many as Task.steps says.
  """

  arch: str
  task: str
  rate: float
  seed: int
  out: Path
  steps: int | None = None

  @property
  def name(self) -> str:
    steps = f'_steps{self.steps}' if self.steps else ''
    return f'{self.task}_{self.arch}_rate{self.rate:g}_seed{self.seed}{steps}'

  @property
  def workdir(self) -> Path:
    return self.out / self.name

  @property
  def metrics(self) -> Path:
    """File for the metrics on the test split."""
    return self.workdir / f'{TASKS[self.task].split}.json'

  def commands(self) -> Iterator[list[str]]:
    """Yields the commands that train and test it, without finished ones."""
    task, (files, settings) = TASKS[self.task], ARCHS[self.arch]
    files = *files, 'size/walk', task.file, 'options/optimizer/adamw'
    steps = self.steps or task.steps
    settings = (
      *(*settings, *task.settings, f'SEGMENT = {task.segment}', 'BATCH = 64'),
      *(f'STEPS = {steps}', f'LEARNING_RATE = {self.rate}'),
      *(f'WARMUP_STEPS = {max(steps // 20, 1)}', 'EVAL_DOCUMENTS = 500'),
      *(f'EVAL_EVERY = {max(steps // 6, 1)}', f'SAVE_EVERY = {steps}'),
      f'experiment.Experiment.seed = {self.seed}',
    )
    if self.metrics.exists():
      return
    yield [
      *('train', f'--workdir={self.workdir}'),
      *(f'--gin_file={file}' for file in files),
      *(f'--gin_param={setting}' for setting in settings),
    ]
    whole = [f'--segment={task.longest}'] if self.arch == _WHOLE else []
    yield [
      *('evaluate', f'--workdir={self.workdir}', '--step=best', *whole),
      *(
        f'--split={task.split}',
        f'--metrics={self.metrics}',
        '--documents=500',
      ),
    ]

  def accuracies(self) -> tuple[float, float]:
    """Returns the best validation accuracy, and the scaled test accuracy."""
    best = max(
      each['accuracy']
      for each in journal.read(journal.path(self.workdir))
      if each.get('split') == 'validation'
    )
    test = json.loads(self.metrics.read_text())['accuracy']
    guess = TASKS[self.task].guess
    return best, (test - guess) / (1 - guess)


def measure(
  out: Path,
  archs: Sequence[str],
  tasks: Sequence[str],
  rates: Sequence[float],
  seeds: int,
  jobs: int,
  steps: int | None = None,
) -> int:
  """Trains, tests, and writes tasks.md, tasks.csv and tasks.png to `out`.

  Called again, it trains and tests only what is missing.

  Args:
    out: folder of the table and of all runs.
    archs, tasks: names in ARCHS and TASKS.
    rates: learning rates to try.
    seeds: number of runs with each rate.
    jobs: runs at a time.
    steps: number of training steps; None: as many as each Task.steps says.

  Returns:
    The exit code: 1 if a run failed, else 0.

  Raises:
    ValueError: there is no such architecture or task, or all runs failed.
  """
  for what, names, known in ('arch', archs, ARCHS), ('task', tasks, TASKS):
    for name in names:
      if name not in known:
        raise ValueError(
          f'This benchmark has no {what} {name!r}{nearest(name, known)}. '
          f'Choose --{what}s from {", ".join(known)}.'
        )
    if not names:
      raise ValueError(f'Name at least one {what} in --{what}s.')
  if out.exists() and not out.is_dir():
    raise ValueError(f'--out={out} is a file. Give a folder.')
  out.mkdir(parents=True, exist_ok=True)
  runs = [
    TaskRun(arch, task, rate, seed, out, steps)
    for task in dict.fromkeys(tasks)
    for arch in dict.fromkeys(archs)
    for rate in dict.fromkeys(rates)
    for seed in range(seeds)
  ]
  failed = work(runs, jobs)
  ended = [run for run in runs if run.metrics.exists()]
  for name, code in failed.items():
    print(f'{name} failed with exit code {code}.')
  if not ended:
    raise ValueError(
      f'No run in {out} has ended. Correct what their messages say.'
    )
  shown = show(ended)
  text = table(shown.data)
  print(f'\n{text}')
  (out / 'tasks.md').write_text(text)
  shown.to_csv(out / 'tasks.csv')
  shown.save(out / 'tasks.png')
  print(f'wrote tasks.md, tasks.csv and tasks.png in {out}')
  return 1 if failed else 0


def show(runs: Sequence[TaskRun]) -> Shown:
  """Returns the accuracies of runs, and a figure of the medians over seeds.

  The arrays have the axes (arch, task, rate, seed) and are NaN where there is
  no run: `validation` is the best validation accuracy, `test` the scaled
  accuracy on the test split.
  """
  import xarray as xr

  axes = 'arch', 'task', 'rate', 'seed'
  names = [list(dict.fromkeys(getattr(r, axis) for r in runs)) for axis in axes]
  arrays = np.full((2, *map(len, names)), np.nan)
  for run in runs:
    place = [
      of.index(getattr(run, a)) for a, of in zip(axes, names, strict=True)
    ]
    arrays[:, *place] = run.accuracies()
  data = xr.Dataset(
    {
      'validation': (axes, arrays[0]),
      'test': (axes, arrays[1]),
    },
    dict(zip(axes, names, strict=True)),
  )
  median_YX = at_best_rate(data).median('seed').values
  archs, tasks = median_YX.shape
  figure = new_figure(2.6 + 0.9 * tasks, 1.6 + 0.42 * archs)
  plot = figure.subplots()
  heat_map(plot, median_YX, 'scaled accuracy', limits=(0, 1))
  for (y, x), value in np.ndenumerate(median_YX):
    color = 'black' if value > 0.5 else 'white'
    text = '' if np.isnan(value) else f'{value:.2f}'
    plot.text(x, y, text, ha='center', va='center', color=color)
  plot.set_xticks(range(tasks), data.task.values, rotation=30, ha='right')
  plot.set_yticks(range(archs), data.arch.values)
  return Shown(data, figure)


def at_best_rate(data: 'xr.Dataset') -> 'xr.DataArray':
  """Returns the tests (arch, task, seed) with the rate best in validation."""
  mean = data.validation.mean('seed')
  # A cell without runs keeps NaN, whichever rate is taken.
  best = mean.fillna(-1).argmax('rate')
  return data.test.isel(rate=best)


def table(data: 'xr.Dataset') -> str:
  """Returns a table in Markdown of the arrays that `show` returns."""
  tests, tasks = at_best_rate(data), data.task.values
  lines = [
    'Scaled accuracy at the tested size, median over seeds (and the best),',
    'with the learning rate that has the best validation accuracy.',
    '',
    f'| | {" | ".join(tasks)} |',
    '|---|' + '---:|' * len(tasks),
  ]
  for arch in data.arch.values:
    cells = []
    for task in tasks:
      found_S = tests.sel(arch=arch, task=task).dropna('seed').values
      best = f' ({max(found_S):.3f})' if len(found_S) > 1 else ''
      cells.append(f'{np.median(found_S):.3f}{best}' if len(found_S) else '')
    lines.append(f'| {arch} | {" | ".join(cells)} |')
  tested = '; '.join(f'{task}: {TASKS[task].split}' for task in tasks)
  return '\n'.join([*lines, '', f'Test splits: {tested}.', ''])
