r"""Trains or resumes the experiments of a table, and compares their results.

  meliad-rec reproduce dynamic_halt/table3 --out=runs/table3 --seeds=3
  meliad-rec reproduce staircase/table1_algorithm --out=runs/small --scale=cpu
  meliad-rec reproduce cpu/code --out=runs/code --gin_param="STORE = 'STORE'"
  meliad-rec reproduce my_files/ --out=runs/mine --jobs=2
  meliad-rec reproduce cpu/code --out=runs/code --only_report

The rows of a table are the shipped gin files gin/experiments/TABLE_*.gin, or
the gin files in a folder of your own. Each row is trained once for each seed,
in OUT/ROW_seedN. Then its best checkpoint is evaluated on the test splits that
the paper reports, or on --splits. Translations and summaries are written by the
newest checkpoint, and scored. --scale=cpu makes the runs so small that two
cores train most rows in half an hour; --scale=gpu fits one GPU, and exists only
for block_recurrent/table1. Rows without a file in gin/scale are left out. The
table is in OUT/table.md, with the published value after a slash; the results of
each run are in OUT/runs.csv, the curves in OUT/curves.png, and the results over
the time of a training step in OUT/cost.png. If rows or splits differ by a
number, such as test_64 and test_128, OUT/figure.png shows the results over it,
or over the parameters of the rows, if a number of these is published; beside a
single curve, rows without a number are horizontal lines. If rows have different
metrics, there is a table and a set of figures for each. If a run fails, the
others continue. When run again, the command resumes what is not finished.

--sweep trains each row with each value of a setting, and names the best on the
validation split, such as the ponder cost of the dynamic-halt paper:

  meliad-rec reproduce dynamic_halt/table1_listops --out=runs/listops \
    --rows=universal,gated_universal --sweep='PONDER_COST = 1, 0.1, 0.01, 0.001'
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import itertools
import json
from pathlib import Path
import re
import statistics

from absl import flags

from meliad_rec.commands import table_rows
from meliad_rec.config import config
from meliad_rec.config import config_flags
from meliad_rec.config import files
from meliad_rec.metrics.metrics import BEST
from meliad_rec.metrics.metrics import unit
from meliad_rec.metrics.text_scores import NAMES
from meliad_rec.report import journal
from meliad_rec.report import plot
from meliad_rec.report import results
from meliad_rec.runs import folder
from meliad_rec.runs.queue import work
from meliad_rec.storage.workdir import local

# Arguments that the help shows, besides flags.
ARGUMENTS = 'TABLE'


@dataclasses.dataclass(frozen=True)
class TableRun:
  """One training run of a table.

  Attributes:
    row: name of its row.
    files: its gin files.
    seed: its seed.
    out: folder of the table.
    setting: the setting 'NAME = value' of --sweep; '' without it.
  """

  row: str
  files: tuple[str, ...]
  seed: int
  out: Path
  setting: str = ''

  @property
  def label(self) -> str:
    """The name of its row in the table."""
    return f'{self.row}, {self.setting}' if self.setting else self.row

  @property
  def name(self) -> str:
    label = re.sub(r'[^\w.-]+', '_', self.label).strip('_')
    return f'{label}_seed{self.seed}'

  @property
  def workdir(self) -> Path:
    return self.out / self.name

  def metrics(self, split: str) -> Path:
    """Returns the file in its folder for the metrics of a split.

    For text, there is also the loss of each token, in a file .npz.
    """
    # No split has such a name, but test_64 is one.
    part = f'_first_{flags.FLAGS.tokens}' if flags.FLAGS.tokens else ''
    return self.workdir / f'{split}{part}.json'

  def scores(self, split: str) -> Path:
    """Returns the file for BLEU and ROUGE of the targets of a split."""
    return self.workdir / f'{split}_scores.json'

  def commands(self) -> Iterator[list[str]]:
    """Yields the commands that train and evaluate it, without finished ones."""
    args = flags.FLAGS
    params = [f'experiment.Experiment.seed = {self.seed}', *args.gin_param]
    params += [self.setting] * bool(self.setting)
    yield [
      *('train', f'--workdir={self.workdir}'),
      *(f'--gin_file={each}' for each in [*self.files, *args.gin_file]),
      *(f'--gin_param={each}' for each in params),
    ]
    written = [split for split, name in wanted_metrics(self) if name in NAMES]
    for split in dict.fromkeys(written):
      if not newer(self.scores(split), journal.path(self.workdir)):
        yield [
          *('translate', str(self.workdir), f'--split={split}'),
          f'--out={self.workdir / split}_targets.txt',
          f'--metrics={self.scores(split)}',
        ]
    for split in splits(self):
      metrics = self.metrics(split)
      # A finished run leaves its journal as it is.
      if newer(metrics, journal.path(self.workdir)):
        continue
      part = [f'--tokens={args.tokens}'] if args.tokens else []
      if not is_labeled(self):
        part.append(f'--out={metrics.with_suffix(".npz")}')
      yield [
        *('evaluate', f'--workdir={self.workdir}', '--step=best', *part),
        *(f'--split={split}', f'--metrics={metrics}'),
      ]


def define_flags() -> None:
  flags.DEFINE_string('out', None, 'Folder of the table; created if needed.')
  flags.DEFINE_list(
    'rows', None, 'Rows to take, in this order; default: all, by name.'
  )
  flags.DEFINE_integer(
    'seeds', 1, 'Runs of each row: seeds 0, 1, ...', lower_bound=1
  )
  flags.DEFINE_integer(
    'jobs',
    1,
    'Runs at a time. Several share the CPU cores, and each writes to a file '
    'ROW_seedN.log instead of the screen.',
    lower_bound=1,
  )
  flags.DEFINE_string(
    'scale',
    'paper',
    'Size of the runs: paper; cpu, for two cores; or gpu, for one GPU, which '
    'only block_recurrent/table1 has. Rows without this scale are left out, '
    'and the exit code is then 1.',
  )
  flags.DEFINE_multi_string(
    'gin_file',
    [],
    'A further gin file of all runs, such as options/X, or task/X in place of '
    'the task of the table; repeatable.',
  )
  flags.DEFINE_multi_string(
    'gin_param', [], "One setting 'NAME = value' of all runs, repeatable."
  )
  flags.DEFINE_string(
    'sweep',
    None,
    'Values of one setting, as in NAME = 1, 0.1: each row is trained with each '
    'of them.',
  )
  flags.DEFINE_list(
    'splits',
    None,
    'Splits on which the best checkpoint is evaluated; SPLIT:METRIC shows '
    'METRIC instead of best_metric. Default: the test splits of which '
    "the paper reports values, or 'test'; none if it reports only times. "
    '--splits= evaluates none.',
  )
  flags.DEFINE_integer(
    'tokens',
    None,
    'Evaluate only this many tokens of each document.',
    lower_bound=1,
  )
  flags.DEFINE_bool('only_report', False, 'Train nothing.')


def main(argv: list[str]) -> int:
  args = flags.FLAGS
  if len(argv) != 2:
    raise ValueError(
      f'Give the name of one table, such as cpu/code, got {len(argv) - 1}. '
      '`meliad-rec settings` lists the experiments.'
    )
  if not args.out:
    raise ValueError('A table needs a folder. Add --out=DIR.')
  if args.tokens and args.splits == []:
    config_flags.refuse(['tokens'], 'has no effect without --splits')
  for name in (each.partition(':')[2] for each in args.splits or ()):
    if name and not unit(name):
      check_metric(name, [*BEST, *NAMES], '--splits')
  out = local(args.out, 'A table')
  rows = table_rows.rows(argv[1], args.rows)
  scaled = table_rows.scaled(rows, args.scale)
  runs = [
    TableRun(row, gin_files, seed, out, setting)
    for row, gin_files in scaled.items()
    for setting in table_rows.settings(args.sweep)
    for seed in range(args.seeds)
  ]
  unscaled = [row for row in rows if row not in scaled]
  left_out = (
    f'These rows are left out, because gin/scale/{args.scale} has no file for '
    f'them: {", ".join(unscaled)}.\n'
  )
  if unscaled:
    print(left_out)
  failed = {}
  if not args.only_report:
    check_different(runs)
    out.mkdir(parents=True, exist_ok=True)
    failed = work(runs, args.jobs)
  done = [run for run in runs if validations(run)]
  if not done:
    todo = 'Train them without --only_report.'
    if failed:
      todo = f'{", ".join(failed)} failed: correct what their messages say.'
    raise ValueError(
      f'No run of {argv[1]} in {out} has been evaluated yet. {todo}'
    )
  found = [result(run) for run in done]
  metrics = list(dict.fromkeys(each['metric'] for each in found))
  by_metric = {
    metric: [each for each in found if each['metric'] == metric]
    for metric in metrics
  }
  texts, pictures = [], []
  for of_metric in by_metric.values():
    text = results.table(argv[1], of_metric)
    if args.sweep:
      text += f'\n{best_settings(done, of_metric)}\n'
    texts.append(text)
  if args.tokens:
    texts.append(
      'Evaluations on other splits than validation read only the first '
      f'{args.tokens:,} tokens of each document.\n'
    )
  texts += [left_out] * bool(unscaled)
  if failed:
    texts.append(
      'These runs failed, so their results are not final: '
      f'{", ".join(failed)}.\n'
    )
  steps = {each['run']: each['steps'] for each in found}
  ends = {run.name: planned_steps(run) for run in done}
  if late := [name for name, end in ends.items() if end and steps[name] < end]:
    counts = (f'{name} ({steps[name]:,} of {ends[name]:,})' for name in late)
    texts.append(
      'These runs have not made all their steps, unless they stopped early: '
      f'{", ".join(counts)}.\n'
    )
  text = '\n'.join(texts)
  print(f'\n{text}')
  for run, code in failed.items():
    why = f'in {out / run}.log' if args.jobs > 1 else 'above'
    print(f'{run} failed with exit code {code}. Its message is {why}.')
  (out / 'table.md').write_text(text)
  results.write_csv(out / 'runs.csv', found)
  for metric, of_metric in by_metric.items():
    suffix = '.png' if len(metrics) == 1 else f'_{metric}.png'
    pictures += draw(out, suffix, of_metric, metric)
  print(f'wrote table.md, runs.csv, {", ".join(pictures)} in {out}')
  return 1 if failed or unscaled else 0


def draw(out: Path, suffix: str, found: list[dict], metric: str) -> list[str]:
  """Draws the figures of results with one metric, and returns their names."""
  pictures = [f'curves{suffix}']
  shown = results.metric_of(results.compared(found), metric)
  folders = {each['run']: out / each['run'] for each in found}
  plot.compare(folders, out / pictures[0], metric)
  if len(costs := results.costs(found)) > 1:
    pictures.append(f'cost{suffix}')
    plot.cost(costs, out / pictures[-1], shown)
  panels, of = results.over_splits(found), metric
  if not panels:
    panels, of = results.over_rows(found), shown
  if panels:
    pictures.append(f'figure{suffix}')
    plot.lines(panels, out / pictures[-1], of)
  return pictures


def best_settings(runs: list[TableRun], found: list[dict]) -> str:
  """Returns a sentence with the best setting of --sweep of each row."""
  by_row, named = {}, {run.name: run for run in runs}
  for each in found:
    run = named[each['run']]
    by_row.setdefault(run.row, {}).setdefault(run.setting, []).append(each)
  metric = found[0]['metric']
  value = lambda runs: results.rank(results.mean(runs, 'validation'), metric)
  chosen = (
    f'{row} with {max(of, key=lambda setting: value(of[setting]))}'
    for row, of in by_row.items()
  )
  return f'Best on the validation split: {"; ".join(chosen)}.'


def check_different(runs: Sequence[TableRun]) -> None:
  """Checks that rows stay different.

  Raises:
    ValueError: --gin_file or --gin_param make two rows the same, or two rows
      would share a folder.
  """
  args, seen, names = flags.FLAGS, {}, {}
  for run in runs:
    if names.setdefault(run.name, run) is not run:
      raise ValueError(
        f'{names[run.name].label} and {run.label} would share the folder '
        f'{run.name}. Remove one of them.'
      )
    if run.seed:
      continue
    own = [run.setting] * bool(run.setting)
    before = bound(run.files, []), run.setting
    after = bound([*run.files, *args.gin_file], [*args.gin_param, *own])
    other, others = seen.setdefault(after, (run.label, before))
    if before != others:
      raise ValueError(
        f'--gin_file or --gin_param overrides what distinguishes the rows '
        f'{other} and {run.label}, so they would be the same run. Remove it, '
        'or choose one of them with --rows.'
      )


def check_metric(name: str, known: Iterable[str], where: str) -> None:
  """Raises ValueError unless a metric is one of those that are known."""
  if name not in known:
    raise ValueError(
      f'{where} has no metric {name!r}{files.nearest(name, known)}. Name one '
      f'of {", ".join(known)} in --splits or PUBLISHED.'
    )


def bound(gin_files: Sequence[str], params: Sequence[str]) -> frozenset:
  """Returns all (name, value) that files and settings bind but PUBLISHED."""
  bindings = config.read([*gin_files], [*params], kinds=()).bindings.items()
  return frozenset(
    (key, repr(one.value)) for key, one in bindings if one.name != 'PUBLISHED'
  )


def splits(run: TableRun) -> list[str]:
  """Returns the splits on which the best checkpoint of a run is evaluated."""
  return list(dict.fromkeys(split for split, _ in wanted_metrics(run)))


def wanted_metrics(run: TableRun) -> list[tuple[str, str]]:
  """Returns (split, metric) of each of `wanted`; '' is best_metric."""
  return [each.partition(':')[::2] for each in wanted(run)]


def wanted(run: TableRun) -> list[str]:
  """Returns what is read from evaluations: SPLIT, or SPLIT:METRIC."""
  if flags.FLAGS.splits is not None:
    return flags.FLAGS.splits
  if not validations(run):
    return []
  _, facts, _ = folder.read(run.workdir)
  if folder.is_of_agents(facts):
    return []  # They have no splits.
  values = [name for name in facts['published'] if not results.is_time(name)]
  if facts['published'] and not values:
    return []
  # Columns, such as the best value on the validation split, are known from the
  # run. Names of several words are other data, such as 'arXiv tokens'.
  others = {*results.COLUMNS}
  names = [name for name in values if ' ' not in name and name not in others]
  return names or ['test']


def newer(path: Path, than: Path) -> bool:
  return path.exists() and path.stat().st_mtime >= than.stat().st_mtime


def validations(run: TableRun) -> list[dict]:
  """Returns the records of all evaluations on the validation split."""
  path = run.workdir / journal.NAME
  records = journal.read(path) if path.is_file() else []
  return [each for each in records if each.get('split') == 'validation']


def planned_steps(run: TableRun) -> int | None:
  """Returns the number of steps in a run's configuration; None if unknown."""
  text, _, _ = folder.read(run.workdir)
  values = config.settings(text)
  steps = values.get('experiment.Experiment.steps')
  return steps if isinstance(steps, int) else values.get('STEPS')


def is_labeled(run: TableRun) -> bool:
  """Returns whether the run predicts labels, and not the next token."""
  return any('scored_tokens' in each for each in validations(run))


def result(run: TableRun) -> dict:
  """Returns the results of a run: {column of runs.csv: value}."""
  _, facts, _ = folder.read(run.workdir)
  metric = facts['best_metric']
  records = journal.read(journal.path(run.workdir))
  points = [(each[metric], each['step']) for each in validations(run)]
  rank = lambda value, step: (results.rank(value, metric), step)
  value, step = max(points, key=lambda point: rank(*point))
  timed = [each for each in records if 'step_seconds' in each]
  seconds = [each['step_seconds'] for each in timed]
  # Each report covers the steps since the one before it.
  ends = [0, *(each['step'] for each in timed)]
  steps = [end - begin for begin, end in itertools.pairwise(ends)]
  last = max(each['step'] for each in records)
  if folder.is_of_agents(facts):  # A single evaluation may be lucky.
    step = last
    late = [v for v, at in points if at > 0.9 * last or at == points[-1][1]]
    value = statistics.fmean(late)
  trained = [each for each in records if each.get('split') == 'train']
  seconds, steps = (seconds, steps) if seconds else ([float('nan')], [1])
  values = (
    *(run.label, run.name, run.seed, facts['parameters']),
    *(statistics.median(seconds), statistics.fmean(seconds, steps), last),
    *(sum(each['tokens'] for each in trained), metric, step, value),
  )
  found = dict(zip(results.COLUMNS, values, strict=True))
  for column in wanted(run):
    split, _, other = column.partition(':')
    path = run.scores(split) if other in NAMES else run.metrics(split)
    if newer(path, journal.path(run.workdir)):
      values = json.loads(path.read_text())
      check_metric(other or metric, values, str(path))
      found[column] = journal.from_json(values[other or metric])
    elif path.exists():
      print(
        f'{path} is left out, because the run was trained further since. '
        'Evaluate it again without --only_report.'
      )
  for name, value in facts['published'].items():
    if value is not None:
      found[f'{results.PUBLISHED}{name}'] = value
  return found
