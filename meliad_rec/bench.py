r"""Measures the library on this machine: python -m meliad_rec.bench NAME.

  python -m meliad_rec.bench step --setting=meliad --rounds=20

NAME is one of BENCHES. step: the time of a training step of each model of the
Block-Recurrent paper's Table 1, and its ratio to Slide with one more layer.
"""

import dataclasses
import json

from absl import flags

from meliad_rec import cli
from meliad_rec.benchmarks import step
from meliad_rec.benchmarks import training
from meliad_rec.config.files import nearest


def define_flags() -> None:
  flags.DEFINE_string(
    'setting', 'meliad', f'Sizes: {", ".join(step.SETTINGS)}.'
  )
  flags.DEFINE_integer(
    'rounds', 20, 'How often each row is timed.', lower_bound=1
  )
  flags.DEFINE_bool(
    'json', False, 'Print JSON: every time, and all units base.'
  )


def main(argv: list[str]) -> None:
  if len(argv) != 2 or argv[1] not in BENCHES:
    given = ' '.join(argv[1:])
    raise ValueError(
      f'There is no bench {given!r}{nearest(given, BENCHES)}; give one of '
      f'{", ".join(BENCHES)}.'
    )
  BENCHES[argv[1]]()


def bench_step() -> None:
  args = flags.FLAGS
  if args.setting not in step.SETTINGS:
    raise ValueError(
      f'There is no setting {args.setting!r}'
      f'{nearest(args.setting, step.SETTINGS)}; set --setting to one of '
      f'{", ".join(step.SETTINGS)}.'
    )
  rows = step.measure(step.SETTINGS[args.setting], args.rounds)
  if args.json:
    found = {name: dataclasses.asdict(row) for name, row in rows.items()}
    print(json.dumps({'setting': args.setting, 'rows': found}, indent=1))
  else:
    print(table(rows))


def table(rows: dict[str, training.Row]) -> str:
  """A line for each row, below the units."""
  ratio = f'/ {step.BASELINE}'
  lines = [
    f'{"":<20} {"step ms":>8} {"spread":>7} {ratio:>11} {"cpu ms":>8} '
    f'{"tokens/s":>9} {"temp MiB":>9} {"compile s":>9} {"GFLOP":>7} '
    f'{"params M":>8}'
  ]
  for name, row in rows.items():
    times = row.times
    lines.append(
      f'{name:<20} {times.median * 1e3:>8.1f} {times.spread:>7.0%} '
      f'{row.ratio:>11.3f} {times.cpu_median * 1e3:>8.0f} '
      f'{row.tokens / times.median:>9.0f} '
      f'{row.temporary_bytes / 2**20:>9.1f} {row.compile_seconds:>9.1f} '
      f'{row.flops / 1e9:>7.2f} {row.parameters / 1e6:>8.2f}'
    )
  return '\n'.join(lines)


BENCHES = {'step': bench_step}


if __name__ == '__main__':
  cli.run_main(main, define_flags)
