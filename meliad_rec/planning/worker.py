"""Process that reads a Question, compiles, and writes an Answer.

`question.ask` starts it with the environment that libtpu needs.
"""

import dataclasses
import json
import math
from pathlib import Path
import sys
import textwrap
from types import SimpleNamespace

import jax

from meliad_rec.config import config
from meliad_rec.planning import environment
from meliad_rec.planning import measure
from meliad_rec.planning import topology
from meliad_rec.planning.question import Answer
from meliad_rec.planning.question import Question
from meliad_rec.planning.question import WORKER
from meliad_rec.reinforcement.a2c import A2C
from meliad_rec.training.experiment import Experiment

# {setting: option that makes it 'full'}.
REMAT = {
  'window.WindowLayer.remat': 'options/remat/full',
  'latent_bottleneck.LatentBottleneck.remat': 'options/remat/chunks',
}


@dataclasses.dataclass(frozen=True)
class NoData:
  """Replacement for a Dataset that is not on this machine.

  Attributes:
    vocab_size: size of the vocabulary.
  """

  vocab_size: int
  splits = ()

  @property
  def vocabulary(self):
    return SimpleNamespace(size=self.vocab_size)

  def documents(self, split: str):
    """Raises ValueError, because there are no documents."""
    raise ValueError(
      f'With --vocab_size, a plan reads no data, but this one needs the split '
      f'{split!r}. '
      'Remove --vocab_size.'
    )


def answer(question: Question) -> Answer:
  """Builds an experiment on a slice, and compiles its training step.

  Returns:
    An Answer. If the step cannot be compiled, Answer.missing says why.

  Raises:
    ValueError: the slice, the configuration or the mesh is wrong.
  """
  where = topology.parse(question.topology)
  experiment = build(question)
  devices, missing = jax.devices(), None
  try:
    devices = topology.devices(question.topology)
  except ValueError:
    if environment.installed():
      raise
    missing = 'libtpu is not installed. Install meliad_rec[tpu]'
  mesh = experiment.mesh(devices=devices)
  experiment = dataclasses.replace(experiment, mesh=lambda: mesh)
  sizes = measure.sizes(experiment)
  notes = check_read(question.vocab_size is not None)
  if experiment.shorter_first:
    notes += ('the first FIRST_STEPS steps count as steps of full segments',)
  if (every := experiment.program.optimizer.every) > 1:
    notes += (
      'times are those of a step that updates the parameters, which one of '
      f'{every} steps does',
    )
  if sizes.depth is not None:
    notes += (
      'FLOP and times assume that loops that may end early run for their '
      f'maximum of {sizes.depth} iterations',
    )
  if sizes.flops is None:
    notes += (
      'TFLOP and MFU are n/a, because the iterations of a loop are not known',
    )
  known = Answer(
    topology=where.name,
    hbm=where.chip.hbm,
    sizes=dataclasses.asdict(sizes),
    compiled=None,
    needed=None,
    missing=missing,
    notes=notes,
    remat=remat(experiment),
  )
  if missing:
    return known
  if question.fast:
    jax.config.update('jax_optimization_level', 'O0')
  # Traced outside of `try`: errors of tracing are not the compiler's.
  _ = experiment.program.traced
  try:
    compiled = measure.compiled(experiment.program, where, sizes.depth)
  except measure.TooLarge as error:
    missing = 'the step does not fit'
    return dataclasses.replace(known, needed=error.needed, missing=missing)
  except Exception as error:
    message = compiler_message(error)
    if message is None:
      raise
    missing = f'the step does not compile: {message}'
    return dataclasses.replace(known, missing=missing)
  return dataclasses.replace(
    known,
    compiled=dataclasses.asdict(compiled),
    needed=compiled.needed,
    notes=notes + compiled.notes,
  )


def build(question: Question) -> Experiment:
  """Returns the experiment that the question's configuration describes.

  Raises:
    ValueError: the configuration is wrong, or its data are missing.
  """
  files, params = list(question.gin_file), list(question.gin_param)
  without_data = question.vocab_size is not None
  # Reports mistakes before data are replaced.
  config.parse(files, params, incomplete=without_data)
  if without_data:
    if config.read(files, params).called(Experiment, 'objective') is A2C:
      raise ValueError('Agents have no vocabulary. Remove --vocab_size.')
    # In the process that `ask` starts, NoData.__module__ is '__main__'.
    data = f'{WORKER}.{NoData.__qualname__}'
    target = f'{Experiment.__module__}.{Experiment.__qualname__}'
    params += [
      f'{target}.data = @{data}()',
      f'{data}.vocab_size = {question.vocab_size}',
    ]
    config.parse(files, params, incomplete=True)
  try:
    return config.build(Experiment)()
  except ValueError as error:
    message = config.sentence(error)
    mistake = isinstance(error, config.ConfigError)
    if without_data or mistake or message is None:
      raise
    raise ValueError(
      f'{message} To plan without the data, give --vocab_size.'
    ) from None


def remat(experiment: Experiment) -> str | None:
  """Returns Answer.remat of an experiment whose layers have been built."""
  if experiment.env is not None:
    # The root of the steps needs the least memory.
    frames, now = experiment.segment, experiment.objective.remat_steps
    several = range(math.isqrt(frames - 1) + 1, frames)
    n = next((n for n in several if frames % n == 0), now)
    return f"--gin_param='REMAT_STEPS = {n}'" if n > now else None
  used = config.settings(config.operative())
  for name, option in REMAT.items():
    if used.get(name, 'full') != 'full':
      return f'--gin_file={option}'
  return None


def check_read(without_data: bool) -> tuple[str, ...]:
  """Checks that something reads every setting of the configuration.

  Args:
    without_data: whether NoData replaces the data. A setting that nothing reads
      may then be a setting of the data.

  Returns:
    Notes for the answer. They are empty, unless `without_data` is True and
    there are settings that nothing reads.

  Raises:
    ConfigError: nothing reads a setting, and `without_data` is False.
  """
  try:
    config.check_read()
  except config.ConfigError as error:
    if not without_data:
      raise
    return (f'settings of the data are not checked: {error}',)
  return ()


def compiler_message(error: Exception) -> str | None:
  """Returns the message of an error of the compiler, or None for other errors.

  The message is one line of at most 200 characters. Errors of lowering a
  kernel, which occur before the compiler runs and have many types, count as
  errors of the compiler. Other errors are defects of this package or mistakes
  in the question.
  """
  if type(error).__module__.partition('.')[0] not in ('jax', 'jaxlib'):
    common = isinstance(error, ValueError | RuntimeError)
    if not common or config.sentence(error) is not None:
      return None
  # The cause may not be in the first line.
  return textwrap.shorten(str(error).strip() or type(error).__name__, 200)


def main(argv: list[str]) -> None:
  asked, answered = map(Path, argv)
  question = Question(**json.loads(asked.read_text()))
  try:
    found = dataclasses.asdict(answer(question))
  except (ValueError, TypeError) as error:
    message = config.sentence(error)
    if message is None:
      raise
    found = {'mistake': message}
  answered.write_text(json.dumps(found))


if __name__ == '__main__':
  main(sys.argv[1:])
