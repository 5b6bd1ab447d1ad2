"""Results of the runs of a table: Markdown, CSV and figures.

A result is {column of runs.csv: value}: COLUMNS, then the value of best_metric
on each split, and what a paper reports, in columns that begin with PUBLISHED.
"""

import csv
import math
from pathlib import Path
import statistics

from meliad_rec.metrics.metrics import BEST
from meliad_rec.metrics.metrics import split_name
from meliad_rec.metrics.metrics import unit

PUBLISHED = 'published '
# A published value of this name is beside the measured time of a step.
_TIME = f'{PUBLISHED}ms per step'
# Columns of runs.csv that come before the splits.
COLUMNS = (
  *('row', 'run', 'seed', 'parameters', 'step_seconds', 'steps', 'tokens'),
  *('metric', 'best_step', 'validation'),
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
  others = [
    each
    for each in published
    if each not in columns and PUBLISHED + each != _TIME
  ]
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
      time(runs),
      *(cell(runs, column) for column in columns),
    ]
    if has_seeds:
      value = best_seed(runs).get(columns[-1])
      cells.append('' if value is None else f'{value:.4f}')
    cells += [f'{runs[0].get(PUBLISHED + each, "")}' for each in others]
    before, now = (mean(some, columns[-1]) for some in (rows[first], runs))
    compared = row != first and before and now is not None
    cells.append(f'{now / before - 1:+.1%}' if compared else '')
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join([*lines, ''])


def time(runs: list[dict]) -> str:
  """Returns the time of a step in ms, with the published one after a slash."""
  text = f'{1000 * mean(runs, "step_seconds"):.0f}'
  published = runs[0].get(_TIME)
  return text if published is None else f'{text} / {published}'


def costs(results: list[dict]) -> dict[str, tuple[float, float, int]]:
  """Returns {row: (seconds of a step, result on the last split, parameters)}.

  Rows that lack one of them are left out.
  """
  found = {}
  split = measured(results)[-1]
  for row, runs in by_row(results).items():
    seconds, value = mean(runs, 'step_seconds'), mean(runs, split)
    if value is not None and math.isfinite(seconds):
      found[row] = seconds, value, runs[0]['parameters']
  return found


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
  if (published := runs[0].get(PUBLISHED + column)) is not None:
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
      base, number = split_name(column)
      values = [each[column] for each in runs if column in each]
      if number and values:
        name = ' '.join([row, base.removeprefix('test').strip('_')]).strip()
        curves.setdefault(name, []).append((number, values))
        if (value := runs[0].get(PUBLISHED + column)) is not None:
          name = f'{name} (published)'
          curves.setdefault(name, []).append((number, [value]))
  if not curves:
    meaning = 'N of the row ..._N'
    for row, runs in by_row(results).items():
      base, number = split_name(row)
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
