r"""Writes the targets of sources, such as translations, by a beam search.

  meliad-rec translate RUN FILE --beams=5 --alpha=1 >TARGETS

FILE has one source in each line, and is - for stdin. The run must be of a model
with an encoder. --average=10 takes the mean of the last ten checkpoints.
"""

import contextlib
import sys

from absl import flags

from meliad_rec.commands import run_flags
from meliad_rec.distributed import compilation_cache
from meliad_rec.generation.beam import BeamSearch
from meliad_rec.generation.beam import PENALTIES
from meliad_rec.report import console
from meliad_rec.report.console import Countdown
from meliad_rec.runs.trained_run import load_run


def define_flags() -> None:
  run_flags.define_step_flags()
  flags.DEFINE_integer(
    'beams', 5, 'Number of beams of the search.', lower_bound=1
  )
  flags.DEFINE_float(
    'alpha',
    1.0,
    'Exponent of the penalty on short targets; 0 for none.',
    lower_bound=0,
  )
  flags.DEFINE_enum(
    'penalty',
    'power',
    list(PENALTIES),
    'Log-probabilities are divided by (tokens)**alpha (power) or '
    '((5 + tokens) / 6)**alpha (gnmt).',
  )
  flags.DEFINE_integer(
    'no_repeat',
    None,
    'No run of this many tokens occurs twice in a target.',
    lower_bound=1,
  )
  flags.DEFINE_integer(
    'tokens',
    None,
    'Maximum tokens of a target; default: 1.2 times as many as the longest '
    'source of a batch, plus 10.',
    lower_bound=1,
  )
  flags.DEFINE_integer(
    'average', 1, 'Number of last checkpoints to average.', lower_bound=1
  )


def main(argv: list[str]) -> None:
  if len(argv) != 3:
    raise ValueError(
      'Give the folder of a run and a file of sources, as in: meliad-rec '
      f'translate RUN FILE. Got {len(argv) - 1} arguments.'
    )
  args = flags.FLAGS
  lines = read_lines(argv[2])
  console.plain()
  compilation_cache.enable()
  step = run_flags.step()
  run = load_run(argv[1], step, args.trusted, args.average)
  beam = BeamSearch(args.beams, args.alpha, args.penalty, args.no_repeat)
  countdown = Countdown(len(lines), 'lines')
  with contextlib.closing(countdown):
    targets = run.translate(lines, beam, args.tokens, countdown.show)
  sys.stdout.writelines(f'{target}\n' for target in targets)


def read_lines(path: str) -> list[str]:
  """Returns the lines of a file, or of stdin if the path is -.

  Raises:
    ValueError: it cannot be read, is not UTF-8, or is empty.
  """
  text = sys.stdin.read() if path == '-' else run_flags.read_text(path)
  lines = text.removesuffix('\n').split('\n')
  if lines == ['']:
    raise ValueError(f'{path} is empty. Give a file with one text per line.')
  return [line.strip() for line in lines]
