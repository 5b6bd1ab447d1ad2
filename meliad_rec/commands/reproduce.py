r"""Trains or resumes the experiments of a table, and compares their results.

  meliad-rec reproduce cpu/code --out=runs/code --gin_param="STORE = 'STORE'"
  meliad-rec reproduce cpu/code --out=runs/code --only_report
  meliad-rec reproduce my_files/ --out=runs/mine --seeds=3 --jobs=2

The rows of a table are the shipped gin files gin/experiments/TABLE_*.gin, or
the gin files in a folder of your own. Each row is trained once for each seed,
in OUT/ROW_seedN. Then its best checkpoint is evaluated on --split. The table is
in OUT/table.md, the results of each run in OUT/runs.csv, and the curves in
OUT/curves.png. A run that fails leaves the others. Run again, the command
resumes what is not finished.
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
from meliad_rec.metrics.metrics import unit
from meliad_rec.report import journal
from meliad_rec.report import plot
from meliad_rec.runs import folder
from meliad_rec.runs.queue import work
from meliad_rec.training.experiment import BEST


@dataclasses.dataclass(frozen=True)
class Run:
  """One training run of a table.

  Attributes:
    row: name of its row.
    file: its gin file.
    seed: its seed.
    out: folder of the table.
  """

  row: str
  file: str
  seed: int
  out: Path

  @property
  def name(self) -> str:
    return f'{self.row}_seed{self.seed}'

  @property
  def workdir(self) -> Path:
    return self.out / self.name

  @property
  def metrics(self) -> Path:
    """File in its folder for the metrics on --split.

    For text, there is also the loss of each token, in a file .npz.
    """
    args = flags.FLAGS
    part = f'_{args.tokens}' if args.tokens else ''
    return self.workdir / f'{args.split}{part}.json'

  def commands(self) -> Iterator[list[str]]:
    """Yields the commands that train and evaluate it, without finished ones."""
    args = flags.FLAGS
    seed = f'experiment.Experiment.seed = {self.seed}'
    yield [
      *('train', f'--gin_file={self.file}', f'--workdir={self.workdir}'),
      *(f'--gin_param={each}' for each in [seed, *args.gin_param]),
    ]
    # A finished run leaves its journal as it is.
    if args.split and not newer(self.metrics, journal.path(self.workdir)):
      part = [f'--tokens={args.tokens}'] if args.tokens else []
      if not is_labeled(self):
        part.append(f'--out={self.metrics.with_suffix(".npz")}')
      yield [
        *('evaluate', f'--workdir={self.workdir}', '--step=best', *part),
        *(f'--split={args.split}', f'--metrics={self.metrics}'),
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
  flags.DEFINE_multi_string(
    'gin_param', [], "One setting 'NAME = value' of all runs, repeatable."
  )
  flags.DEFINE_string(
    'split', None, 'Split on which the best checkpoint is evaluated.'
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
  if args.tokens and not args.split:
    config_flags.refuse(['tokens'], 'needs --split')
  out = Path(args.out)
  runs = [
    Run(row, file, seed, out)
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
  print(f'wrote table.md, runs.csv and curves.png in {out}')
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
  found = {
    'row': run.row,
    'run': run.name,
    'seed': run.seed,
    'parameters': facts['parameters'],
    'step_seconds': statistics.median(seconds or [float('nan')]),
    'steps': last,
    'tokens': last * facts['batch'] * facts['segment'],
    'metric': metric,
    'best_step': step,
    'validation': value,
  }
  split = flags.FLAGS.split
  if split and run.metrics.exists():
    found[split] = json.loads(run.metrics.read_text())[metric]
  return found


def table(name: str, results: list[dict]) -> str:
  """Returns a table in Markdown: one line for each row, averaged over seeds."""
  by_row = {}
  for each in results:
    by_row.setdefault(each['row'], []).append(each)
  metric = results[0]['metric']
  splits = ['validation']
  if all(flags.FLAGS.split in each for each in results):
    splits.append(flags.FLAGS.split)
  first = next(iter(by_row))
  head = ['row', 'seeds', 'parameters', 'tokens', 'ms/step', *splits]
  head.append(f'change to {first}')
  lines = [
    f'{name}: {metric} ({unit(metric)}), mean ± standard deviation over seeds',
    '',
    f'| {" | ".join(head)} |',
    '|---|' + '---:|' * (len(head) - 1),
  ]
  mean = lambda runs, column: statistics.fmean(each[column] for each in runs)
  for row, runs in by_row.items():
    cells = [
      row,
      str(len(runs)),
      f'{runs[0]["parameters"]:,}',
      f'{runs[0]["tokens"]:,}',
      f'{1000 * mean(runs, "step_seconds"):.0f}',
    ]
    for split in splits:
      values = [each[split] for each in runs]
      spread = f' ± {statistics.stdev(values):.4f}' if values[1:] else ''
      cells.append(f'{mean(runs, split):.4f}{spread}')
    before, now = mean(by_row[first], splits[-1]), mean(runs, splits[-1])
    compared = row != first and before
    cells.append(f'{now / before - 1:+.1%}' if compared else '')
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join([*lines, ''])


def write_csv(path: Path, results: list[dict]) -> None:
  with path.open('w', newline='') as file:
    columns = list(dict.fromkeys(name for each in results for name in each))
    writer = csv.DictWriter(file, columns)
    writer.writeheader()
    writer.writerows(results)
