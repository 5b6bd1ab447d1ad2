r"""Predicts memory and step time of training on TPUs, on any machine.

  meliad-rec plan --topology=v5e:8x16 --mesh=data:32,model:4 \
    --gin_file=arch/block_recurrent --gin_file=size/150m --gin_file=task/pg19

Compiles the trainer's own step for each slice of --topology, in minutes for
each. This needs libtpu: install meliad_rec[tpu]. All numbers are the
compiler's estimates, or computed from the compiled program.

The exit code is 0 if the step fits in the memory of every slice, and 3 if there
is a slice in which it does not fit. Otherwise it is 4: for some slice this is
not known, because libtpu is missing or the step does not compile.
"""

from collections.abc import Sequence
import dataclasses
import json
import sys

from absl import flags

from meliad_rec.config import config_flags
from meliad_rec.planning import environment
from meliad_rec.planning import report
from meliad_rec.planning import topology
from meliad_rec.planning.question import Answer
from meliad_rec.planning.question import ask
from meliad_rec.planning.question import Question

# Exit codes in addition to the codes of cli.run_main.
DOES_NOT_FIT = 3
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
    'Size of the vocabulary, if the data are not on this machine.',
    lower_bound=1,
  )
  flags.DEFINE_bool(
    'fast',
    False,
    'Compile faster, with little optimization: no step times are reported.',
  )
  flags.DEFINE_enum(
    'by',
    None,
    ['kind', 'place'],
    'Also print where the time of a step goes: by kind of operation, or by '
    'place in the model.',
  )
  flags.DEFINE_bool('json', False, 'Print JSON, in bytes, seconds and FLOP.')


def main(argv: list[str]) -> int:
  args = flags.FLAGS
  config_flags.check_no_arguments(argv)
  if not args.topology:
    raise ValueError(
      'A plan needs a slice of TPUs. Give --topology, such as v5e:16x16.'
    )
  if args.json:
    config_flags.refuse(['by'], 'cannot be combined with --json')
  if args.fast:
    config_flags.refuse(['by'], 'cannot be combined with --fast')
  slices = list(map(topology.parse, args.topology))
  for where in slices:
    config_flags.check_mesh(where.devices, where.name)
  questions = [question(where.name) for where in slices]
  answers = list(map(answer, questions))
  advice = list(map(report.advice, answers))
  if args.json:
    print(json.dumps(as_json(answers, advice), indent=1))
  else:
    print(report.table(answers), flush=True)
    if args.by:
      print(report.breakdown(answers, args.by), flush=True)
  for sentence in filter(None, advice):
    print(sentence, file=sys.stderr)
  fits = {one.fits for one in answers}
  if False in fits:
    return DOES_NOT_FIT
  return UNKNOWN if None in fits else 0


def question(name: str) -> Question:
  """Returns the question that the flags ask about a slice such as 'v5e:2x2'."""
  args = flags.FLAGS
  return Question(
    topology=name,
    gin_file=tuple(args.gin_file),
    gin_param=(*args.gin_param, *config_flags.given_mesh()),
    vocab_size=args.vocab_size,
    fast=args.fast,
  )


def answer(one: Question) -> Answer:
  """Returns the plan of the training step on a slice of TPUs; takes minutes."""
  if environment.installed():
    print(f'Compiling for {one.topology} ...', file=sys.stderr)
  return ask(one)


def as_json(answers: Sequence[Answer], advice: Sequence[str | None]) -> dict:
  """Returns the plans of all slices for JSON, in bytes, seconds and FLOP.

  Args:
    answers: the plan of each slice.
    advice: a sentence for each plan; None: no advice.
  """
  return {
    'source': report.SOURCE,
    'plans': [
      {
        **dataclasses.asdict(one),
        'fits': one.fits,
        'rates': report.rates(one),
        'advice': sentence,
      }
      for one, sentence in zip(answers, advice, strict=True)
    ],
  }
