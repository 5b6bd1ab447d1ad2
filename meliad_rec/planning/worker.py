"""The process that compiles: reads a Question, writes an Answer.

`question.ask` starts it with the environment that libtpu needs.

What a compiler says of a step that it does not take.

A kernel may be refused before the compiler sees it, by what lowers it for the
chip, with errors of many types.
"""

import dataclasses
import json
from pathlib import Path
import sys
import textwrap

import jax

from meliad_rec.config import config
from meliad_rec.planning import environment
from meliad_rec.planning import measure
from meliad_rec.planning import topology
from meliad_rec.planning.no_data import bindings
from meliad_rec.planning.question import Answer
from meliad_rec.planning.question import Question
from meliad_rec.training.experiment import Experiment

_LENGTH = 200


def compiler_sentence(error: Exception) -> str | None:
  """Its text in one line of 200 letters.

  None: it is a defect of the program, or a mistake in what was asked.
  """
  theirs = type(error).__module__.partition('.')[0] in ('jax', 'jaxlib')
  if not theirs:
    common = isinstance(error, ValueError | RuntimeError)
    if not common or config.sentence(error) is not None:
      return None
  # What matters may stand behind the first line.
  text = str(error).strip() or type(error).__name__
  return textwrap.shorten(text, _LENGTH)


def answer(question: Question) -> Answer:
  """Builds the experiment on the slice, and compiles its step.

  Raises:
    ValueError: a mistake in what was asked.
  """
  where = topology.parse(question.topology)
  files, params = list(question.gin_file), list(question.gin_param)
  config.parse(files, params)  # Mistakes are told before anything is replaced.
  instead = bindings(files, params, question.vocab_size)
  config.parse(files, [*params, *instead])
  experiment = build(question.vocab_size)
  devices, missing = jax.devices(), None
  try:
    devices = topology.devices(question.topology)
  except ValueError:
    if environment.installed():
      raise
    missing = 'libtpu is not installed; install meliad_rec[tpu]'
  mesh = experiment.mesh(devices=devices)
  experiment = dataclasses.replace(experiment, mesh=lambda: mesh)
  sizes = measure.sizes(experiment)
  notes = check_read(bool(instead))
  if experiment.shorter_first:
    notes += ('the first steps, of shorter segments, count as the others',)
  if sizes.depth is not None:
    notes += (
      f'loops that may end early count as the {sizes.depth} turns that they '
      'take at most, in FLOP and in time',
    )
  if sizes.flops is None:
    notes += ('TFLOP and MFU are n/a, as the length of a loop is not known',)
  known = Answer(
    topology=where.name,
    hbm=where.chip.hbm,
    sizes=dataclasses.asdict(sizes),
    compiled=None,
    needed=None,
    missing=missing,
    notes=notes,
  )
  if missing:
    return known
  if question.fast:
    jax.config.update('jax_exec_time_optimization_effort', -1.0)
  # What fails here is no word of the compiler's.
  _ = experiment.program.traced
  try:
    compiled = measure.compiled(experiment.program, where, sizes.depth)
  except measure.TooLarge as error:
    told = 'the step does not fit'
    return dataclasses.replace(known, needed=error.needed, missing=told)
  except Exception as error:
    told = compiler_sentence(error)
    if told is None:
      raise
    missing = f'the step does not compile: {told}'
    return dataclasses.replace(known, missing=missing)
  return dataclasses.replace(
    known,
    compiled=dataclasses.asdict(compiled),
    needed=compiled.needed,
    notes=notes + compiled.notes,
  )


def build(vocab_size: int | None) -> Experiment:
  """The experiment of the configuration.

  Raises:
    ValueError: a mistake in the configuration, or what it reads is not here.
  """
  try:
    return config.build(Experiment)()
  except ValueError as error:
    told = config.sentence(error)
    mistake = isinstance(error, config.ConfigError)
    if vocab_size is not None or mistake or told is None:
      raise
    raise ValueError(
      f'{told} To plan without the data, give --vocab_size.'
    ) from None


def check_read(without_data: bool) -> tuple[str, ...]:
  """As config.check_read; a note where it may be of data that are left out."""
  try:
    config.check_read()
  except config.ConfigError as error:
    if not without_data:
      raise
    return (f'the data are not built, and {error}',)
  return ()


def main(argv: list[str]) -> None:
  asked, answered = map(Path, argv)
  question = Question(**json.loads(asked.read_text()))
  try:
    found = dataclasses.asdict(answer(question))
  except (ValueError, TypeError) as error:
    told = config.sentence(error)
    if told is None:
      raise
    found = {'mistake': told}
  answered.write_text(json.dumps(found))


if __name__ == '__main__':
  main(sys.argv[1:])
