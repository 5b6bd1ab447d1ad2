r"""Says what training on a slice of TPUs would take, from any machine.

  python -m meliad_rec plan --topology=v5e:16x16 --mesh=data:64,model:4 \
    --gin_file=arch/block_recurrent --gin_file=size/150m --gin_file=task/pg19

The trainer's own step is compiled for the slice, which takes a minute or two
and libtpu: install meliad_rec[tpu]. All figures are estimates of the compiler
and from its program. Of a step that does not fit, changes are tried that make
it fit. The exit code is 3 if one does not fit or breaks the --budget, and 4 if
it is not known, as where the compiler refuses the step; the reason is told.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import json
import sys

from absl import flags

from meliad_rec.config import config_flags
from meliad_rec.planning import advice
from meliad_rec.planning import environment
from meliad_rec.planning import report
from meliad_rec.planning import topology
from meliad_rec.planning.question import Answer
from meliad_rec.planning.question import ask
from meliad_rec.planning.question import Question

# Exit codes, which no other end of a process has.
BROKEN = 3
UNKNOWN = 4


def define_flags() -> None:
  config_flags.define_flags()
  flags.DEFINE_list(
    'topology', [], 'Slices to plan for, such as v5e:16x16,v5p:4x4x4.'
  )
  config_flags.define_mesh_flag()
  flags.DEFINE_integer(
    'vocab_size',
    None,
    'Size of the vocabulary, where data or a model file are not here.',
    lower_bound=1,
  )
  flags.DEFINE_string(
    'budget',
    None,
    'What a step may take: hbm=14GiB on each device, forbid=all-to-all; fits '
    'is no limit, but that one must be able to say.',
  )
  flags.DEFINE_bool(
    'fast', False, 'Compile with little care: no times, for checks alone.'
  )
  flags.DEFINE_bool('json', False, 'Print JSON, all units base.')


def main(argv: list[str]) -> int:
  args = flags.FLAGS
  if argv[1:]:
    raise ValueError(f'{argv[1]!r} is no flag; write --flag=value.')
  if not args.topology:
    raise ValueError(
      'A plan is for a slice of TPUs; give --topology, such as v5e:16x16.'
    )
  limits = report.Budget()
  if args.budget is not None:
    limits = report.parse(args.budget)
    environment.check()
  slices = list(map(topology.parse, args.topology))
  for where in slices:
    config_flags.check_mesh(where.devices, where.name)
  questions = [question(where.name) for where in slices]
  answers = list(map(answer, questions))
  if not args.json:
    # Changes take a while, and more can go wrong.
    print(report.table(answers), flush=True)
  attempt = functools.partial(answer, doing='Trying a change')
  tried = {
    found.topology: list(advice.trials(one, found, attempt))
    for one, found in zip(questions, answers, strict=True)
    if found.fits is False
  }
  # Without libtpu nothing can break, and a plan says so.
  checked = answers if environment.installed() else []
  breaches = [
    on_progress for found in checked for on_progress in limits.breaches(found)
  ]
  unknown = [
    on_progress for found in checked for on_progress in limits.unknown(found)
  ]
  if args.json:
    print(json.dumps(as_json(answers, tried, breaches, unknown), indent=1))
  else:
    for name, trials in tried.items():
      print(*advice.lines(name, trials), sep='\n')
  for on_progress in (*breaches, *unknown):
    print(on_progress, file=sys.stderr)
  if breaches:
    return BROKEN
  return UNKNOWN if unknown else 0


def question(name: str) -> Question:
  """What the flags ask of a slice."""
  args = flags.FLAGS
  return Question(
    topology=name,
    gin_file=tuple(args.gin_file),
    gin_param=(*args.gin_param, *config_flags.given_mesh()),
    vocab_size=args.vocab_size,
    fast=args.fast,
  )


def answer(one: Question, doing: str = 'Compiling') -> Answer:
  """As `ask`, and says what takes a while."""
  if environment.installed():
    print(f'{doing} for {one.topology} ...', file=sys.stderr)
  return ask(one)


def as_json(
  answers: Sequence[Answer],
  tried: Mapping[str, Sequence[advice.Trial]],
  breaches: Sequence[str],
  unknown: Sequence[str],
) -> dict:
  """All that is known, in bytes, seconds and FLOP."""
  return {
    'source': report.HEAD,
    'plans': [
      {
        **dataclasses.asdict(one),
        'fits': one.fits,
        'rates': report.rates(one),
        'changes': [
          dataclasses.asdict(trial) for trial in tried.get(one.topology, ())
        ],
      }
      for one in answers
    ],
    'breaches': list(breaches),
    'unknown': list(unknown),
  }
