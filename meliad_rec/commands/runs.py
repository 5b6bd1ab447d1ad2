r"""Shows several runs side by side: how far, how good, how fast.

  python -m meliad_rec runs runs/slide runs/rec --plot=curves.png

Step times are medians over the training lines of metrics.jsonl.
"""

from pathlib import Path
import statistics

from absl import flags

from meliad_rec.metrics.metrics import unit
from meliad_rec.report import journal
from meliad_rec.report import plot

_MORE_IS_BETTER = ('accuracy', 'tokens_per_second', 'mfu', 'epoch')


def define_flags() -> None:
  flags.DEFINE_string('metric', 'bits_per_byte', 'The figure to compare.')
  flags.DEFINE_string('split', 'validation', 'The split it is of.')
  flags.DEFINE_string('plot', None, 'File for a picture of its curves, a PNG.')


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  if not argv[1:]:
    raise ValueError('There is no run to show; give folders of runs.')
  runs = {Path(each).resolve().name: each for each in argv[1:]}
  if len(runs) < len(argv[1:]):
    raise ValueError(
      'Two of the folders have the same last name, by which runs are called '
      'here; rename one.'
    )
  if args.plot and Path(args.plot).suffix != '.png':
    raise ValueError(
      f'{args.plot} is to be a picture; give a name that ends in .png.'
    )
  print(table(runs, args.metric, args.split))
  if args.plot:
    plot.compare(runs, args.plot, args.metric)
    print(f'wrote {args.plot}')


def table(runs: dict[str, str], metric: str, split: str) -> str:
  """A line for each run, the best last figure first, below the units.

  Args:
    runs: folders by name.
    metric: a name that the runs have written.
    split: where it was measured.

  Raises:
    ValueError: a run has no such figure.
  """
  rows = {name: row(folder, metric, split) for name, folder in runs.items()}
  sign = -1 if metric in _MORE_IS_BETTER else 1
  width = max(map(len, rows))
  lines = [
    f'{metric} ({unit(metric) or "?"}) on {split}; '
    'training steps: medians of their times',
    f'{"":<{width}} {"step":>9} {"last":>9} {"best":>9} {"at step":>9} '
    f'{"step ms":>9} {"tokens/s":>9}',
  ]
  for name, each in sorted(rows.items(), key=lambda r: sign * r[1]['last']):
    best_step, best = min(each['points'], key=lambda p: sign * p[1])
    lines.append(
      f'{name:<{width}} {each["step"]:>9} {each["last"]:>9.4f} {best:>9.4f} '
      f'{best_step:>9} {each["seconds"] * 1e3:>9.1f} {each["speed"]:>9.0f}'
    )
  return '\n'.join(lines)


def row(folder: str, metric: str, split: str) -> dict:
  """The figures of one run."""
  records = journal.read(journal.path(folder))
  points = [
    (r['step'], r[metric])
    for r in records
    if r.get('split') == split and metric in r
  ]
  if not points:
    raise ValueError(
      f'{folder} has no {metric} on {split} yet; choose others with --metric '
      'and --split.'
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
