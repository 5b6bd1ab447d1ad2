"""Results of the runs of a table: Markdown, CSV and figures.

A result is {column of runs.csv: value}: COLUMNS, then the value of best_metric
on each split, and what a paper reports, in columns that begin with PUBLISHED.
"""

import csv
import math
from pathlib import Path
import re
import statistics

import numpy as np

from meliad_rec.metrics.metrics import BEST
from meliad_rec.metrics.metrics import split_name
from meliad_rec.metrics.metrics import unit
from meliad_rec.report.console import counted

PUBLISHED = 'published '
# A published value of this name is in the column of the time of a step.
_TIME = 'ms per step'
# Endings of the names of a standard deviation over seeds and of a median.
_OF_SEEDS = ' deviation', ' median'
# The name of a published number of parameters.
_SIZE = 'parameters'
# Names of published times and speeds.
_TIMES = re.compile(
  f'{_TIME}|minutes per .* steps|step time to .*|.*(words|steps)/s'
)
# Columns of runs.csv that come before the splits. step_seconds is the median
# over the reports of a run, so that what else the machine does hardly counts.
COLUMNS = (
  *('row', 'run', 'seed', 'parameters', 'step_seconds', 'mean_step_seconds'),
  *('steps', 'tokens', 'metric', 'best_step', 'validation'),
)


def by_row(results: list[dict]) -> dict[str, list[dict]]:
  """Returns {row: results of its runs}."""
  found = {}
  for each in results:
    found.setdefault(each['row'], []).append(each)
  return found


def measured(results: list[dict]) -> list[str]:
  """Returns the splits that were evaluated, the validation split first."""
  names = dict.fromkeys(name for each in results for name in each)
  others = {*COLUMNS}
  splits = [each for each in names if each not in others and ' ' not in each]
  return ['validation', *splits]


def is_time(name: str) -> bool:
  """Returns whether a published value of this name is a time or a speed."""
  return bool(_TIMES.fullmatch(name))


def compared(results: list[dict]) -> str:
  """Returns the column that rows are compared by: the last that all have."""
  rows = by_row(results).values()
  shared = [
    column
    for column in measured(results)
    if all(mean(runs, column) is not None for runs in rows)
  ]
  return shared[-1] if shared else 'validation'


def metric_of(column: str, metric: str) -> str:
  """Returns the metric of a column; `metric` unless it names another."""
  return column.partition(':')[2] or metric


def table(name: str, results: list[dict]) -> str:
  """Returns a table in Markdown: one line for each row, averaged over seeds."""
  metric = results[0]['metric']
  rows = by_row(results)
  columns = measured(results)
  published = dict.fromkeys(
    key.removeprefix(PUBLISHED)
    for each in results
    for key in each
    if key.startswith(PUBLISHED)
  )
  beside = {*columns, _TIME, _SIZE}
  beside |= {column + each for column in columns for each in _OF_SEEDS}
  others = [each for each in published if each not in beside]
  times = [name for name in others if any(map_times(name, rows).values())]
  others = [each for each in others if each not in times]
  first = next(iter(rows))
  has_seeds = any(len(runs) > 1 for runs in rows.values())
  meaning = 'mean ± standard deviation [median] over seeds'
  if times or published.keys() & beside:
    meaning += ' / published'
  head = ['row', 'seeds', 'parameters', 'tokens', 'ms/step', *columns]
  head += ['best seed'] * has_seeds
  head += [*times, *(f'published: {each}' for each in others)]
  by = compared(results)
  head.append(f'change of {by} to {first}')
  lines = [
    f'{name}: {metric} ({unit(metric)}), {meaning}',
    '',
    f'| {" | ".join(head)} |',
    '|---|' + '---:|' * (len(head) - 1),
  ]
  for row, runs in rows.items():
    ms = 1000 * mean(runs, 'step_seconds')
    cells = [
      row.replace('|', r'\|'),
      str(len(runs)),
      beside_published(runs[0]['parameters'], ',', runs, _SIZE),
      f'{runs[0]["tokens"]:,}',
      beside_published(ms, '.0f' if ms >= 100 else '.3g', runs, _TIME),
      *(cell(runs, column) for column in columns),
    ]
    if has_seeds:
      value = best_seed(runs).get(by)
      cells.append('' if value is None else f'{value:.4f}')
    for name in times:
      value = map_times(name, rows)[row]
      cells.append(beside_published(value, '.3g', runs, name))
    cells += [f'{runs[0].get(PUBLISHED + each, "")}' for each in others]
    before, now = (mean(some, by) for some in (rows[first], runs))
    has_both = row != first and before and now is not None
    cells.append(f'{(now - before) / abs(before):+.1%}' if has_both else '')
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join([*lines, ''])


def map_times(name: str, rows: dict[str, list[dict]]) -> dict:
  """Returns {row: measured counterpart of a published time or speed}.

  The value is None where there is none.

  Args:
    name: 'minutes per N steps', by the mean time of a step; 'step time to ROW',
      the ratio to another row; 'training K words/s', where tokens count as
      words (of pairs, only the tokens of targets); or 'training K steps/s', for
      agents.
    rows: result of `by_row`.
  """
  if found := re.fullmatch(r'minutes per (\d+) steps', name):
    # Steps of models that halt take longer or shorter as these learn.
    steps, column = int(found[1]), 'mean_step_seconds'
    return {row: steps * mean(runs, column) / 60 for row, runs in rows.items()}
  seconds = {row: mean(runs, 'step_seconds') for row, runs in rows.items()}
  if name in ('training K words/s', 'training K steps/s'):
    tokens = {row: runs[0]['tokens'] for row, runs in rows.items()}
    steps = {row: runs[0]['steps'] for row, runs in rows.items()}
    return {
      row: tokens[row] / steps[row] / s / 1000 for row, s in seconds.items()
    }
  other = seconds.get(name.removeprefix('step time to '))
  return {row: other and s / other for row, s in seconds.items()}


def beside_published(
  value: float | None, form: str, runs: list[dict], name: str
) -> str:
  """Returns a number as text, and what is published of it after a slash."""
  text = '-' if value is None else format(value, form)
  published = runs[0].get(PUBLISHED + name)
  return text if published is None else f'{text} / {published:,}'


def costs(results: list[dict]) -> dict[str, tuple[float, float, int]]:
  """Returns {row: (seconds of a step, value of `compared`, parameters)}.

  Rows that lack one of them are left out.
  """
  found, column = {}, compared(results)
  for row, runs in by_row(results).items():
    seconds, value = mean(runs, 'step_seconds'), mean(runs, column)
    if value is not None and math.isfinite(seconds):
      found[row] = seconds, value, runs[0]['parameters']
  return found


def mean(runs: list[dict], column: str) -> float | None:
  """Returns the mean over the runs that have a value; None if none has."""
  values = [each[column] for each in runs if column in each]
  return statistics.fmean(values) if values else None


def rank(value: float, metric: str) -> tuple[bool, float]:
  """Returns a key of which the best value has the highest, and NaN the lowest.

  Args:
    value: value of the metric.
    metric: a name in metrics.BEST.
  """
  sign = -1 if BEST[metric] == 'lowest' else 1
  return not math.isnan(value), sign * value


def best_seed(runs: list[dict]) -> dict:
  """Returns the run of a row whose validation is best."""
  return max(runs, key=lambda each: rank(each['validation'], each['metric']))


def cell(runs: list[dict], column: str) -> str:
  """Returns the text of a split of a row: measured / published.

  Either is a mean ± standard deviation [median], if there are several seeds. If
  only some runs have a value, their number follows.
  """
  values = [each[column] for each in runs if column in each]
  text = f'{statistics.fmean(values):.4f}' if values else '-'
  if values[1:]:
    # Divided by the number of seeds, as in Ray Chowdhury and Caragea 2024.
    with np.errstate(invalid='ignore'):  # If a run diverged.
      spread, median = np.std(values), np.median(values)
    text += f' ± {spread:.4f} [{median:.4f}]'
  if 0 < len(values) < len(runs):
    text += f' ({counted(len(values), "seed")})'
  published = runs[0].get(PUBLISHED + column)
  if published is None:
    return text
  spread, median = (
    runs[0].get(PUBLISHED + column + each) for each in _OF_SEEDS
  )
  text += f' / {published}'
  text += '' if spread is None else f' ± {spread}'
  return text if median is None else f'{text} [{median}]'


Curves = dict[str, list[tuple[float, list[float]]]]


def over_splits(results: list[dict]) -> dict[str, Curves]:
  """Returns the results over the numbers in the names of splits.

  These are test_64 and test_128 of each row, or the middle of length_200_300,
  and what is published of them.

  Returns:
    {what the number is: {name of a curve: [(number, values of all seeds)]}},
    without curves of a single number.
  """
  panels = {}
  for row, runs in by_row(results).items():
    for column in measured(runs):
      base, number = split_range(column)
      if number is not None:
        panel = panels.setdefault(f'N of the split {base}_N', {})
        values = [each[column] for each in runs if column in each]
        _add(panel, row, number, values)
        if (value := runs[0].get(PUBLISHED + column)) is not None:
          _add(panel, f'{row} (published)', number, [value])
  return _longer(panels)


def over_rows(results: list[dict]) -> dict[str, Curves]:
  """Returns the values of `compared` over the numbers in the names of rows.

  Such rows are passes_2 and passes_4. If a number of parameters is published,
  the numbers mean sizes, and each is replaced by the parameters of the row.
  Beside a single curve, each row without a number is a horizontal line. The
  result has the same form as in `over_splits`.
  """
  curves, others, column = {}, {}, compared(results)
  sizes = any(PUBLISHED + _SIZE in each for each in results)
  for row, runs in by_row(results).items():
    base, number = split_name(row)
    values = [each[column] for each in runs if column in each]
    if number is not None:
      number = runs[0]['parameters'] if sizes else number
      _add(curves, base or row, number, values)
    elif values:
      others[row] = values
  what = 'parameters' if sizes else 'N of the row ..._N'
  panels = _longer({f'{what} ({column})': curves})
  for panel in panels.values():
    if len(panel) == 1:
      [points] = panel.values()
      for row, values in others.items():
        panel[row] = [(number, values) for number, _ in points]
  return panels


def _add(curves: Curves, name: str, number: float, values: list[float]) -> None:
  if values:
    curves.setdefault(name, []).append((number, values))


def _longer(panels: dict[str, Curves]) -> dict[str, Curves]:
  """Returns the curves of several numbers, in their order."""
  found = {}
  for panel, curves in panels.items():
    if longer := {k: sorted(each) for k, each in curves.items() if each[1:]}:
      found[panel] = longer
  return found


def split_range(name: str) -> tuple[str, float | None]:
  """Returns 'length' and 250.0 of 'length_200_300', else as split_name does."""
  if found := re.fullmatch(r'(.+)_(\d+)_(\d+)', name):
    return found[1], (int(found[2]) + int(found[3])) / 2
  return split_name(name)


def write_csv(path: Path, results: list[dict]) -> None:
  with path.open('w', newline='') as file:
    columns = list(dict.fromkeys(name for each in results for name in each))
    writer = csv.DictWriter(file, columns)
    writer.writeheader()
    writer.writerows(results)
