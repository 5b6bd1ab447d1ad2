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
cores train them in an hour or two, and --scale=gpu fits one GPU. The table is
in OUT/table.md, with the published value after a slash; the results of each run
are in OUT/runs.csv, and the curves in OUT/curves.png. If rows or splits differ
by a number, such as test_64 and test_128, OUT/figure.png shows the results over
this number. A run that fails leaves the others. Run again, the command resumes
what is not finished.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import csv
import dataclasses
import json
from pathlib import Path
import re
import statistics

from absl import flags

from meliad_rec.config import config_flags
from meliad_rec.config import files
from meliad_rec.metrics.metrics import parts
from meliad_rec.metrics.metrics import unit
from meliad_rec.metrics.text_scores import NAMES
from meliad_rec.report import journal
from meliad_rec.report import plot
from meliad_rec.runs import folder
from meliad_rec.runs.queue import work
from meliad_rec.training.experiment import BEST

_PUBLISHED = 'published '  # Begins the names of columns of runs.csv.
# Columns of runs.csv that come before the splits.
_COLUMNS = (
  *('row', 'run', 'seed', 'parameters', 'step_seconds', 'steps', 'tokens'),
  *('metric', 'best_step', 'validation'),
)


@dataclasses.dataclass(frozen=True)
class Run:
  """One training run of a table.

  Attributes:
    row: name of its row.
    files: its gin files.
    seed: its seed.
    out: folder of the table.
  """

  row: str
  files: tuple[str, ...]
  seed: int
  out: Path

  @property
  def name(self) -> str:
    return f'{self.row}_seed{self.seed}'

  @property
  def workdir(self) -> Path:
    return self.out / self.name

  def metrics(self, split: str) -> Path:
    """Returns the file in its folder for the metrics of a split.

    For text, there is also the loss of each token, in a file .npz.
    """
    part = f'_{flags.FLAGS.tokens}' if flags.FLAGS.tokens else ''
    return self.workdir / f'{split}{part}.json'

  def scores(self, split: str) -> Path:
    """Returns the file for BLEU and ROUGE of the targets of a split."""
    return self.workdir / f'{split}_scores.json'

  def commands(self) -> Iterator[list[str]]:
    """Yields the commands that train and evaluate it, without finished ones."""
    args = flags.FLAGS
    seed = f'experiment.Experiment.seed = {self.seed}'
    yield [
      *('train', f'--workdir={self.workdir}'),
      *(f'--gin_file={each}' for each in [*self.files, *args.gin_file]),
      *(f'--gin_param={each}' for each in [seed, *args.gin_param]),
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
    'Size of the runs: paper, or a folder of gin/scale with a file for the '
    'table, such as cpu.',
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
  flags.DEFINE_list(
    'splits',
    None,
    'Splits on which the best checkpoint is evaluated; default: the test '
    "splits of which the paper reports values, or 'test'. --splits= evaluates "
    'none.',
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
  out = Path(args.out)
  runs = [
    Run(row, (file, *scale(file, args.scale)), seed, out)
    for row, file in rows(argv[1], args.rows).items()
    for seed in range(args.seeds)
  ]
  failed = {}
  if not args.only_report:
    out.mkdir(parents=True, exist_ok=True)
    failed = work(runs, args.jobs)
  results = [result(run) for run in runs if validations(run)]
  if not results:
    todo = 'Train them without --only_report.'
    if failed:
      todo = f'{", ".join(failed)} failed: correct what their messages say.'
    raise ValueError(
      f'No run of {argv[1]} in {out} has been evaluated yet. {todo}'
    )
  [metric, *others] = {each['metric'] for each in results}
  if others:
    raise ValueError(
      f'The rows measure different metrics: {", ".join([metric, *others])}. '
      'Give a table whose rows have the same best_metric.'
    )
  text = table(argv[1], results)
  print(f'\n{text}')
  for run, code in failed.items():
    print(f'{run} failed with exit code {code}.')
  (out / 'table.md').write_text(text)
  write_csv(out / 'runs.csv', results)
  folders = {each['run']: out / each['run'] for each in results}
  plot.compare(folders, out / 'curves.png', metric)
  pictures = ['curves.png']
  curves, number = figure(results)
  if curves:
    plot.lines(curves, out / 'figure.png', number, metric)
    pictures.append('figure.png')
  print(f'wrote table.md, runs.csv and {" and ".join(pictures)} in {out}')
  return 1 if failed else 0


def rows(table: str, chosen: Sequence[str] | None) -> dict[str, str]:
  """Returns {name of a row: its gin file}.

  Args:
    table: beginning of the names of shipped experiments, or a folder.
    chosen: names of the rows to take; None takes all.

  Raises:
    ValueError: there is no such table, or it lacks a chosen row.
  """
  if Path(table).is_dir():
    found = {path.stem: str(path) for path in Path(table).glob('*.gin')}
  else:
    table = table.removeprefix('gin/').removeprefix('experiments/')
    found = {
      name.removeprefix(f'{table}_'): f'experiments/{name}'
      for name in files.names('experiments')
      if name.startswith(f'{table}_')
    }
  if not found:
    names = files.names('experiments')
    raise ValueError(
      f'There is no table {table!r}{files.nearest(table, names)}: no folder of '
      'this name has gin files, and no shipped experiment begins with it. '
      '`meliad-rec settings` lists the experiments.'
    )
  for name in chosen or ():
    if name not in found:
      raise ValueError(
        f'{table} has no row {name!r}{files.nearest(name, found)}. Choose '
        f'--rows from {", ".join(found)}.'
      )
  number = lambda name: [int(n) for n in re.findall(r'\d+', name)]
  chosen = chosen or sorted(found, key=lambda name: (number(name), name))
  return {name: found[name] for name in chosen}


def scale(file: str, name: str) -> tuple[str, ...]:
  """Returns the gin files that bring a row to a scale.

  That is the file of gin/scale/NAME whose name is the longest beginning of the
  row's name: a file table1 is for all rows of a table, and a file table1_xl for
  those rows only that begin so.

  Args:
    file: gin file of the row.
    name: name of the scale; 'paper' needs no file.

  Raises:
    ValueError: no file of that scale is for the row.
  """
  if name == 'paper':
    return ()
  row = file.removeprefix('experiments/')
  known = files.names('scale')
  fitting = [
    each
    for each in known
    if f'{name}/{row}_'.startswith(f'{each}_') and each.startswith(f'{name}/')
  ]
  if not fitting:
    scales = {}
    for each in known:
      scale_, _, rows = each.partition('/')
      table_ = re.match(r'[^/]*/[a-z]+\d*(_\d+)?', rows)[0]
      scales.setdefault(scale_, {})[table_] = None
    listed = (f'{name} for {", ".join(of)}' for name, of in scales.items())
    raise ValueError(
      f'There is no --scale={name} of {row}. The scales are paper for all '
      f'tables, {", and ".join(listed)}.'
    )
  return (f'scale/{max(fitting, key=len)}',)


def splits(run: Run) -> list[str]:
  """Returns the splits on which the best checkpoint of a run is evaluated."""
  return list(dict.fromkeys(split for split, _ in wanted_metrics(run)))


def wanted_metrics(run: Run) -> list[tuple[str, str]]:
  """Returns (split, metric) of each of `wanted`; '' is best_metric."""
  return [each.partition(':')[::2] for each in wanted(run)]


def wanted(run: Run) -> list[str]:
  """Returns what is read from evaluations: SPLIT, or SPLIT:METRIC."""
  if flags.FLAGS.splits is not None:
    return flags.FLAGS.splits
  if not validations(run):
    return []
  _, facts, _ = folder.read(run.workdir)
  if folder.is_of_agents(facts):
    return []  # They have no splits.
  # Other published values have names of several words. The best value on the
  # validation split is in the journal of the run.
  others = [name for name in facts['published'] if ' ' not in name]
  return [name for name in others if name != 'validation'] or ['test']


def newer(path: Path, than: Path) -> bool:
  return path.exists() and path.stat().st_mtime >= than.stat().st_mtime


def validations(run: Run) -> list[dict]:
  """Returns the records of all evaluations on the validation split."""
  path = run.workdir / journal.NAME
  records = journal.read(path) if path.is_file() else []
  return [each for each in records if each.get('split') == 'validation']


def is_labeled(run: Run) -> bool:
  """Returns whether the run predicts labels, and not the next token."""
  return any('scored_tokens' in each for each in validations(run))


def result(run: Run) -> dict:
  """Returns the results of a run: {column of runs.csv: value}."""
  _, facts, _ = folder.read(run.workdir)
  metric = facts['best_metric']
  records = journal.read(journal.path(run.workdir))
  points = [(each[metric], each['step']) for each in validations(run)]
  value, step = (min if BEST[metric] == 'lowest' else max)(points)
  seconds = [each['step_seconds'] for each in records if 'step_seconds' in each]
  last = max(each['step'] for each in records)
  if folder.is_of_agents(facts):  # A single evaluation may be lucky.
    step = last
    late = [v for v, at in points if at > 0.9 * last or at == points[-1][1]]
    value = statistics.fmean(late)
  values = (
    *(run.row, run.name, run.seed, facts['parameters']),
    *(statistics.median(seconds or [float('nan')]), last),
    *(last * facts['batch'] * facts['segment'], metric, step, value),
  )
  found = dict(zip(_COLUMNS, values, strict=True))
  for column in wanted(run):
    split, _, other = column.partition(':')
    path = run.scores(split) if other in NAMES else run.metrics(split)
    if path.exists():
      found[column] = json.loads(path.read_text())[other or metric]
  for name, value in facts['published'].items():
    if value is not None:
      found[f'{_PUBLISHED}{name}'] = value
  return found


def by_row(results: list[dict]) -> dict[str, list[dict]]:
  """Returns {row: results of its runs}."""
  found = {}
  for each in results:
    found.setdefault(each['row'], []).append(each)
  return found


def measured(results: list[dict]) -> list[str]:
  """Returns the splits that were evaluated, the validation split first."""
  names = dict.fromkeys(name for each in results for name in each)
  others = {*_COLUMNS}
  splits = [each for each in names if each not in others and ' ' not in each]
  return ['validation', *splits]


def table(name: str, results: list[dict]) -> str:
  """Returns a table in Markdown: one line for each row, averaged over seeds."""
  metric = results[0]['metric']
  rows = by_row(results)
  columns = measured(results)
  published = dict.fromkeys(
    key.removeprefix(_PUBLISHED)
    for each in results
    for key in each
    if key.startswith(_PUBLISHED)
  )
  others = [each for each in published if each not in columns]
  first = next(iter(rows))
  has_seeds = any(len(runs) > 1 for runs in rows.values())
  meaning = 'mean ± standard deviation [median] over seeds'
  if published.keys() & {*columns}:
    meaning += ' / published'
  head = ['row', 'seeds', 'parameters', 'tokens', 'ms/step', *columns]
  head += ['best seed'] * has_seeds
  head += [f'published: {each}' for each in others]
  head.append(f'change to {first}')
  lines = [
    f'{name}: {metric} ({unit(metric)}), {meaning}',
    '',
    f'| {" | ".join(head)} |',
    '|---|' + '---:|' * (len(head) - 1),
  ]
  for row, runs in rows.items():
    cells = [
      row,
      str(len(runs)),
      f'{runs[0]["parameters"]:,}',
      f'{runs[0]["tokens"]:,}',
      f'{1000 * mean(runs, "step_seconds"):.0f}',
      *(cell(runs, column) for column in columns),
    ]
    if has_seeds:
      value = best_seed(runs).get(columns[-1])
      cells.append('' if value is None else f'{value:.4f}')
    cells += [f'{runs[0].get(_PUBLISHED + each, "")}' for each in others]
    before, now = (mean(some, columns[-1]) for some in (rows[first], runs))
    compared = row != first and before and now is not None
    cells.append(f'{now / before - 1:+.1%}' if compared else '')
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join([*lines, ''])


def mean(runs: list[dict], column: str) -> float | None:
  """Returns the mean over the runs that have a value; None if none has."""
  values = [each[column] for each in runs if column in each]
  return statistics.fmean(values) if values else None


def best_seed(runs: list[dict]) -> dict:
  """Returns the run of a row whose validation is best."""
  best = min if BEST[runs[0]['metric']] == 'lowest' else max
  return best(runs, key=lambda each: each['validation'])


def cell(runs: list[dict], column: str) -> str:
  """Returns the text of a split of a row: measured / published."""
  values = [each[column] for each in runs if column in each]
  text = f'{statistics.fmean(values):.4f}' if values else '-'
  if values[1:]:
    spread, median = statistics.stdev(values), statistics.median(values)
    text += f' ± {spread:.4f} [{median:.4f}]'
  if (published := runs[0].get(_PUBLISHED + column)) is not None:
    text += f' / {published}'
  return text


def figure(
  results: list[dict],
) -> tuple[dict[str, list[tuple[float, list[float]]]], str]:
  """Returns the results over the number at the end of splits or rows.

  Splits come first: test_64 and test_128 of each row, and what is published of
  them. If the splits have no numbers, then rows do: passes_2 and passes_4.

  Returns:
    ({name of a curve: [(number, values of all seeds)]}, what the number is).
    The dict is empty if no two splits or rows differ by a number.
  """
  meaning = 'N of the split test_N'
  curves = {}
  for row, runs in by_row(results).items():
    for column in measured(runs):
      base, number = parts(column)
      values = [each[column] for each in runs if column in each]
      if number and values:
        name = ' '.join([row, base.removeprefix('test').strip('_')]).strip()
        curves.setdefault(name, []).append((number, values))
        if (value := runs[0].get(_PUBLISHED + column)) is not None:
          name = f'{name} (published)'
          curves.setdefault(name, []).append((number, [value]))
  if not curves:
    meaning = 'N of the row ..._N'
    for row, runs in by_row(results).items():
      base, number = parts(row)
      column = measured(runs)[-1]
      values = [each[column] for each in runs if column in each]
      if number and values:
        curves.setdefault(base, []).append((number, values))
  curves = {name: sorted(each) for name, each in curves.items() if each[1:]}
  return curves, meaning


def write_csv(path: Path, results: list[dict]) -> None:
  with path.open('w', newline='') as file:
    columns = list(dict.fromkeys(name for each in results for name in each))
    writer = csv.DictWriter(file, columns)
    writer.writeheader()
    writer.writerows(results)
