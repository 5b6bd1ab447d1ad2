r"""Compares the steps, metrics and speed of runs, and can plot them.

  meliad-rec runs runs/slide runs/rec --plot=curves.png
  meliad-rec runs runs/rec --plot=all.png \
    --metric=loss_nats_per_token,learning_rate,tokens_per_second

Times of a step and tokens per second are medians over the training lines of
metrics.jsonl.
"""

import math
from pathlib import Path
import statistics

from absl import flags

from meliad_rec.metrics.metrics import BEST
from meliad_rec.metrics.metrics import unit
from meliad_rec.report import journal
from meliad_rec.report import plot
from meliad_rec.storage import output_file

# Arguments that the help shows, besides flags.
ARGUMENTS = 'RUN...'

_MORE_IS_BETTER = (
  *('tokens_per_second', 'mfu', 'epoch'),
  *(metric for metric, best in BEST.items() if best == 'highest'),
)


def define_flags() -> None:
  flags.DEFINE_list(
    'metric',
    'bits_per_byte',
    'Metric to compare; more than one, separated by commas, to plot.',
  )
  flags.DEFINE_string(
    'split',
    None,
    'Split on which the metric was measured; default: validation or, if the '
    'metric was not measured there, train; a plot shows all splits.',
  )
  flags.DEFINE_string('plot', None, 'Plot of the curves to write, a .png file.')


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  if not argv[1:]:
    raise ValueError('No run was given. Give one or more folders of runs.')
  runs = {}
  for each in argv[1:]:
    name = Path(each).resolve().name
    if name in runs:
      raise ValueError(
        f'{runs[name]} and {each} are both named {name}, but this command '
        'tells runs apart by the names of their folders. Rename one, or give '
        'each folder once.'
      )
    runs[name] = each
  if args.plot:
    output_file.check(args.plot, '.png')
  if not all(args.metric or ['']):
    raise ValueError(
      f'--metric={",".join(args.metric)} has an empty name. Give a metric, '
      'such as bits_per_byte.'
    )
  if len(args.metric) > 1 and not args.plot:
    raise ValueError(
      f'--metric={",".join(args.metric)} are several metrics, which can only '
      'be plotted. Add --plot=FILE.png, or give one metric.'
    )
  print(table(runs, args.metric[0], args.split))
  if args.plot:
    plot.compare(runs, args.plot, *args.metric, split=args.split)
    print(f'wrote {args.plot}')


def table(runs: dict[str, str], metric: str, split: str | None) -> str:
  """Returns a table of runs as text, sorted by the last value of the metric.

  The run with the best last value is first; NaN is worse than any value.

  Args:
    runs: {name: folder}.
    metric: name of a metric in metrics.jsonl.
    split: split on which the metric was measured. None means validation or, if
      no run has the metric there, train.

  Raises:
    ValueError: a run has no such metric.
  """
  if split is None:
    measured = [
      record.get('split')
      for folder in runs.values()
      for record in journal.read(journal.path(folder))
      if metric in journal.metrics_of(record)
    ]
    split = 'validation' if 'validation' in measured else 'train'
  rows = {name: row(folder, metric, split) for name, folder in runs.items()}
  sign = -1 if metric in _MORE_IS_BETTER else 1
  rank = lambda value: (math.isnan(value), sign * value)
  width = max(map(len, rows))
  lines = [
    f'{metric} ({unit(metric) or "?"}) on {split}; '
    'step ms and tokens/s: medians of training',
    f'{"":<{width}} {"step":>9} {"last":>9} {"best":>9} {"at step":>9} '
    f'{"step ms":>9} {"tokens/s":>9}',
  ]
  for name, each in sorted(rows.items(), key=lambda r: rank(r[1]['last'])):
    best_step, best = min(each['points'], key=lambda p: rank(p[1]))
    lines.append(
      f'{name:<{width}} {each["step"]:>9} {each["last"]:>9.4f} {best:>9.4f} '
      f'{best_step:>9} {each["seconds"] * 1e3:>9.1f} {each["speed"]:>9.0f}'
    )
  return '\n'.join(lines)


def row(folder: str, metric: str, split: str) -> dict:
  """Returns the values of one run that `table` shows.

  Args:
    folder: folder of the run.
    metric: name of a metric in metrics.jsonl.
    split: split on which the metric was measured.

  Returns:
    A dict: 'step' is the last step, 'points' a list of (step, value of the
    metric), 'last' the last value, 'seconds' the median time of a step, and
    'speed' the median of tokens per second.

  Raises:
    ValueError: the run has no such metric.
  """
  records = journal.read(journal.path(folder))
  points = [
    (r['step'], r[metric])
    for r in records
    if r.get('split') == split and metric in journal.metrics_of(r)
  ]
  if not points:
    measured = {}  # In order of appearance.
    for record in records:
      if names := journal.metrics_of(record):
        measured.setdefault(record['split'], set()).update(names)
    listed = '; '.join(
      f'{", ".join(sorted(names))} on {each}'
      for each, names in measured.items()
    )
    raise ValueError(
      f'{folder} has no {metric} on {split}. Choose another --metric or '
      f'--split. It has {listed or "no metrics yet"}.'
    )
  training = [r for r in records if 'step_seconds' in r]
  median = lambda name: statistics.median(
    [r[name] for r in training] or [float('nan')]
  )
  return {
    'step': max(r['step'] for r in records),
    'points': points,
    'last': points[-1][1],
    'seconds': median('step_seconds'),
    'speed': median('tokens_per_second'),
  }
