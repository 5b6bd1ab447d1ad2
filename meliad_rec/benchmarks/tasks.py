"""Compares architectures on tasks that need a memory.

  meliad-rec bench tasks --out=DIR [--tasks=parity] [--archs=lstm,window]

Each architecture is trained on each task with each learning rate and seed, and
tested on sequences of several sizes. The results are a table, the same numbers
as a CSV file, and two figures: the accuracies at the last size, and those at
all sizes. They show the learning rate with the best validation accuracy; of
equally good rates, the first in --rates. Each run is tested at its step with
the best validation accuracy; of equally good steps, the latest. A run that
failed counts as 0 in the choice of the rate, and has no test.

The longest test sequences are longer than those for training. The exception is
`automaton`: its sizes are numbers of steps ahead, and its tests have rules that
do not occur in training.

Scaled accuracy is 1 if all answers are right, and 0 for a uniform guess. Other
guesses reach up to 0.14 on `brackets` and 0.25 on `automaton`, there by giving
all cells the state that most cells of the last ring have. On `variables`, one
of the four numbers in the text, whichever begins with the digits given so far,
reaches 0.56. On `recall`, the most frequent value in the pairs reaches 0.27
with 4 pairs and 0.07 with 32. On `rewrites`, the value of the last pair reaches
0.40 with 4 pairs and 0.06 with 32.

A test has 2,000 sequences; of `recall` and `rewrites` 1,000, and of `needle`
and `variables` 200, with two digits each. The standard error of a guess is thus
0.022 on `parity`, 0.017 on `needle` and `variables`, and less on the others.

On `automaton`, a rule has 32 bits, of which the rings show 26 on average. With
the most frequent value in place of the others, a model that applies the rule
reaches 0.98 at one step ahead, and 0.89 at four.

The models have 0.05 to 0.17 million parameters (gin/size/walk). --gin_param
changes a setting of all runs: attention to a whole sequence learns `recall`
within 750 steps if its first scale is 5 instead of 1.

  meliad-rec bench tasks --out=DIR --tasks=recall --archs=window --rates=0.003 \
    --gin_param='layer_config.LayerConfig.qk_scale = 5.0' \
    --gin_param='WINDOW = 128'

Otherwise, in `window` and in the recurrent architectures, a layer attends to at
most 8 tokens back, so two layers reach 16 tokens back. `universal` reads the
whole sequence.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import itertools
import json
from pathlib import Path
import re
from typing import TYPE_CHECKING

import numpy as np

from meliad_rec.config.files import nearest
from meliad_rec.explore.shown import heat_map
from meliad_rec.explore.shown import letters_on
from meliad_rec.explore.shown import Shown
from meliad_rec.report import journal
from meliad_rec.report import plot
from meliad_rec.runs.queue import work

if TYPE_CHECKING:
  from matplotlib.figure import Figure
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
_COLUMNS = 4  # Panels of a figure beside one another.


@dataclasses.dataclass(frozen=True)
class Task:
  """A task of the benchmark.

  Attributes:
    file: its gin file.
    settings: its settings, as in --gin_param, without TEST_SIZES.
    steps: number of training steps.
    segment: tokens of a training sequence, at most.
    split: name of a test split, with {} in place of its size.
    sizes: sizes of the test splits.
    longest: tokens of a sequence of the last test split.
    guess: accuracy of a random guess.
  """

  file: str
  settings: tuple[str, ...]
  steps: int
  segment: int
  split: str
  sizes: tuple[int, ...]
  longest: int
  guess: float


def _problem(
  group: str, order: int, steps: int, most: int, sizes: tuple[int, ...]
) -> Task:
  """Returns a word problem of a group, of which the last label is scored."""
  settings = f"GROUP = '{group}'", f'MAX_SIZE = {most}'
  return Task(
    *('task/word_problem', settings, steps, most),
    *('test_{}_last', sizes, sizes[-1], 1 / order),
  )


def _arithmetic(brackets: bool) -> Task:
  settings = (f'BRACKETS = {brackets}',)
  return Task(
    *('task/arithmetic', settings, 5000, 40),
    *('test_{}', (64, 128, 256), 256, 1 / 5),
  )


def _recall(rewrites: float) -> Task:
  settings = 'KEYS = 64', 'VALUES = 64', 'MAX_SIZE = 16'
  return Task(
    *('task/associative_recall', (*settings, f'REWRITES = {rewrites}')),
    *(5000, 128, 'test_{}', (4, 8, 16, 32), 256, 1 / 64),
  )


def _needle(*settings: str) -> Task:
  return Task(
    *('task/needle', ('MAX_SIZE = 256', 'DIGITS = 2', *settings), 3000, 256),
    *('test_{}', (256, 1024, 4096), 4096, 1 / 10),
  )


TASKS = {
  'parity': _problem('Z2', 2, 3000, 40, (64, 128, 256)),
  's3': _problem('S3', 6, 3000, 32, (32, 64, 128)),
  'a5': _problem('A5', 60, 5000, 32, (32, 64, 128)),
  's5': _problem('S5', 120, 5000, 32, (32, 64, 128)),
  'arithmetic': _arithmetic(False),
  'brackets': _arithmetic(True),
  'recall': _recall(0.0),
  'rewrites': _recall(0.5),
  'automaton': Task(
    *('task/cellular_automaton', ('CELLS = 11', 'MAX_SIZE = 4'), 5000, 136),
    *('test_{}', (1, 2, 3, 4), 131, 1 / 2),
  ),
  'needle': _needle(),
  'variables': _needle('CHAINS = 4', 'HOPS = 2'),
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
    params: further settings, such as 'WINDOW = 128'. They override those of the
      task and the architecture.
  """

  arch: str
  task: str
  rate: float
  seed: int
  out: Path
  steps: int | None = None
  params: tuple[str, ...] = ()

  @property
  def name(self) -> str:
    steps = [f'steps{self.steps}'] if self.steps else []
    set_ = [re.sub(r'[^\w.=+-]', '', each) for each in self.params]
    rate, seed = f'rate{self.rate:g}', f'seed{self.seed}'
    return '_'.join([self.task, self.arch, rate, seed, *steps, *set_])

  @property
  def workdir(self) -> Path:
    return self.out / self.name

  def metrics(self, size: int) -> Path:
    """Returns the file for the metrics on the test split of a size."""
    return self.workdir / f'{TASKS[self.task].split.format(size)}.json'

  @property
  def has_ended(self) -> bool:
    """Whether it has been tested at all sizes."""
    return all(self.metrics(size).exists() for size in TASKS[self.task].sizes)

  def commands(self) -> Iterator[list[str]]:
    """Yields the command that trains or resumes it, and those that test it.

    Sizes at which it has been tested are left out, and all commands if these
    are all sizes.
    """
    task, (files, settings) = TASKS[self.task], ARCHS[self.arch]
    files = *files, 'size/walk', task.file, 'options/optimizer/adamw'
    steps = self.steps or task.steps
    settings = (
      *(*settings, *task.settings, f'TEST_SIZES = {task.sizes}'),
      *(f'SEGMENT = {task.segment}', 'BATCH = 64'),
      *(f'STEPS = {steps}', f'LEARNING_RATE = {self.rate}'),
      *(f'WARMUP_STEPS = {max(steps // 20, 1)}', 'EVAL_DOCUMENTS = 500'),
      *(f'EVAL_EVERY = {max(steps // 6, 1)}', f'SAVE_EVERY = {steps}'),
      *(f'experiment.Experiment.seed = {self.seed}', *self.params),
    )
    if self.has_ended:
      return
    yield [
      *('train', f'--workdir={self.workdir}'),
      *(f'--gin_file={file}' for file in files),
      *(f'--gin_param={setting}' for setting in settings),
    ]
    whole = [f'--segment={task.longest}'] if self.arch == _WHOLE else []
    for size in task.sizes:
      if not self.metrics(size).exists():
        yield [
          *('evaluate', f'--workdir={self.workdir}', '--step=best', *whole),
          *(f'--split={task.split.format(size)}',),
          f'--metrics={self.metrics(size)}',
        ]

  def accuracies(self) -> tuple[float, dict[int, float]]:
    """Returns the best validation accuracy, and {size: scaled accuracy}."""
    best = max(
      each['accuracy']
      for each in journal.read(journal.path(self.workdir))
      if each.get('split') == 'validation'
    )
    task, found = TASKS[self.task], {}
    for size in task.sizes:
      accuracy = json.loads(self.metrics(size).read_text())['accuracy']
      found[size] = (accuracy - task.guess) / (1 - task.guess)
    return best, found


def measure(
  out: Path,
  archs: Sequence[str],
  tasks: Sequence[str],
  rates: Sequence[float],
  seeds: int,
  jobs: int,
  steps: int | None = None,
  params: Sequence[str] = (),
) -> int:
  """Trains and tests; writes tasks.md, .csv, .png and sizes.png to `out`.

  Called again, it trains and tests only what is missing.

  Args:
    out: folder of the table and of all runs.
    archs, tasks: names in ARCHS and TASKS.
    rates: learning rates to try.
    seeds: number of runs with each rate.
    jobs: runs at a time.
    steps: number of training steps; None: as many as each Task.steps says.
    params: settings 'NAME = value' of all runs.

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
    TaskRun(arch, task, rate, seed, out, steps, tuple(params))
    for task in dict.fromkeys(tasks)
    for arch in dict.fromkeys(archs)
    for rate in dict.fromkeys(rates)
    for seed in range(seeds)
  ]
  failed = work(runs, jobs)
  for name, code in failed.items():
    print(f'{name} failed with exit code {code}.')
  if not any(run.has_ended for run in runs):
    raise ValueError(
      f'No run in {out} has ended. Correct what their messages say.'
    )
  shown = show(runs)
  text = table(shown.data)
  if failed:
    text += f'\nThese runs failed: {", ".join(failed)}.\n'
  print(f'\n{text}')
  (out / 'tasks.md').write_text(text)
  shown.to_csv(out / 'tasks.csv')
  shown.save(out / 'tasks.png')
  plot.save(draw_sizes(shown.data), out / 'sizes.png')
  print(f'wrote tasks.md, tasks.csv, tasks.png and sizes.png in {out}')
  return 1 if failed else 0


def show(runs: Sequence[TaskRun]) -> Shown:
  """Returns the accuracies of runs, and a figure of the medians over seeds.

  The arrays are NaN where there is no run that has ended: `validation`, the
  best validation accuracy, with the axes (arch, task, rate, seed); and `test`,
  the scaled accuracy, with a further axis `size`. The figure has the last size
  of each task.
  """
  import xarray as xr

  axes = 'arch', 'task', 'rate', 'seed'
  names = [list(dict.fromkeys(getattr(r, axis) for r in runs)) for axis in axes]
  sizes = sorted({size for run in runs for size in TASKS[run.task].sizes})
  shape = [len(of) for of in names]
  validation = np.full(shape, np.nan)
  test = np.full((*shape, len(sizes)), np.nan)
  for run in filter(lambda run: run.has_ended, runs):
    place = tuple(
      of.index(getattr(run, a)) for a, of in zip(axes, names, strict=True)
    )
    validation[place], found = run.accuracies()
    for size, value in found.items():
      test[(*place, sizes.index(size))] = value
  data = xr.Dataset(
    {'validation': (axes, validation), 'test': ((*axes, 'size'), test)},
    {**dict(zip(axes, names, strict=True)), 'size': sizes},
  )
  median_YX = at_last_size(at_best_rate(data)).median('seed').values
  archs, tasks = median_YX.shape
  figure = plot.new_figure(2.6 + 0.9 * tasks, 1.6 + 0.42 * archs)
  axes = figure.subplots()
  image = heat_map(axes, median_YX, 'scaled accuracy', limits=(0, 1))
  colors_YX = letters_on(image, median_YX)
  for (y, x), value in np.ndenumerate(median_YX):
    text = '' if np.isnan(value) else f'{value:.2f}'
    axes.text(x, y, text, ha='center', va='center', color=colors_YX[y, x])
  axes.set_xticks(range(tasks), data.task.values, rotation=30, ha='right')
  axes.set_yticks(range(archs), data.arch.values)
  return Shown(data, figure)


def draw_sizes(data: 'xr.Dataset') -> 'Figure':
  """Returns a figure of the accuracies over the sizes, a panel for each task.

  Args:
    data: arrays that `show` returns.
  """
  tests = at_best_rate(data).median('seed')
  tasks = data.task.values
  rows = -(-len(tasks) // _COLUMNS)
  figure = plot.new_figure(3.2 * min(len(tasks), _COLUMNS), 2.6 * rows + 0.6)
  panels = figure.subplots(rows, min(len(tasks), _COLUMNS), squeeze=False)
  for axes, task in itertools.zip_longest(panels.flat, tasks):
    if task is None:
      axes.set_axis_off()
      continue
    sizes = TASKS[task].sizes
    for number, arch in enumerate(data.arch.values):
      values = tests.sel(arch=arch, task=task, size=list(sizes)).values
      style = {'color': f'C{number}', 'marker': 'osD^v<>P'[number % 8]}
      axes.plot(sizes, values, label=arch, markersize=4, **style)
    axes.set_xscale('log', base=2)
    axes.set_xticks(sizes, sizes)
    axes.minorticks_off()
    axes.set_ylim(-0.1, 1.05)
    axes.grid(alpha=0.3)
    axes.set_title(task, fontsize='medium')
  for axes in panels[:, 0]:
    axes.set_ylabel('scaled accuracy')
  for axes in panels[-1]:
    axes.set_xlabel('size of a test sequence')
  handles = panels[0, 0].get_legend_handles_labels()
  figure.legend(*handles, loc='outside lower center', ncols=4)
  return figure


def at_last_size(tests: 'xr.DataArray') -> 'xr.DataArray':
  """Returns the tests of each task at its last size, without that axis."""
  import xarray as xr

  last = [TASKS[task].sizes[-1] for task in tests.task.values]
  return tests.sel(size=xr.DataArray(last, dims='task'))


def at_best_rate(data: 'xr.Dataset') -> 'xr.DataArray':
  """Returns tests (arch, task, seed, size) at the rate best in validation."""
  # A cell without runs keeps NaN, whichever rate is taken.
  return data.test.isel(rate=_validation(data).argmax('rate'))


def _validation(data: 'xr.Dataset') -> 'xr.DataArray':
  """Returns the mean over seeds of the best validation accuracy.

  A run that failed counts as 0. Otherwise, a rate with which most runs diverge
  would be chosen for the few that do not.
  """
  return data.validation.fillna(0).mean('seed')


def table(data: 'xr.Dataset') -> str:
  """Returns tables in Markdown of the arrays that `show` returns.

  If there are several rates, a second table has the validation accuracy of each
  of them.
  """
  tests, tasks = at_last_size(at_best_rate(data)), data.task.values
  validation, seeds = _validation(data), data.sizes['seed']

  def tested(arch, task):
    found_S = tests.sel(arch=arch, task=task).dropna('seed').values
    if not len(found_S):
      return ''
    best = f' ({max(found_S):.3f})' if len(found_S) > 1 else ''
    few = f', {len(found_S)} of {seeds} runs' if len(found_S) < seeds else ''
    return f'{np.median(found_S):.3f}{best}{few}'

  def validated(arch, task):
    found_R = validation.sel(arch=arch, task=task).values
    return ', '.join(f'{value:.3f}' for value in found_R)

  def rows(cell):
    yield f'| | {" | ".join(tasks)} |'
    yield '|---|' + '---:|' * len(tasks)
    for arch in data.arch.values:
      yield f'| {arch} | {" | ".join(cell(arch, task) for task in tasks)} |'

  splits = '; '.join(
    f'{task}: {TASKS[task].split.format(TASKS[task].sizes[-1])}'
    for task in tasks
  )
  lines = [
    'Scaled accuracy at the last size, median over seeds (and the best),',
    'with the learning rate that has the best validation accuracy.',
    *('', *rows(tested), '', f'Test splits: {splits}.', ''),
  ]
  if data.sizes['rate'] > 1:
    rates = ', '.join(f'{rate:g}' for rate in data.rate.values)
    lines += [
      f'Validation accuracy with the learning rates {rates}, mean over seeds,',
      'where a run without a result counts as 0.',
      *('', *rows(validated), ''),
    ]
  return '\n'.join(lines)
