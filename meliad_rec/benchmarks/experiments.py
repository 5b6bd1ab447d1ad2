"""Compares training steps of any experiments.

  meliad-rec bench experiments cpu/code_slide cpu/code_rec \\
    --gin_param="STORE = 'STORE'"

Each row is a shipped experiment or a gin file. All steps read random tokens.
"""

from collections.abc import Sequence
from pathlib import Path

from meliad_rec.benchmarks import training
from meliad_rec.config import config
from meliad_rec.training.experiment import Experiment
from meliad_rec.training.program import TrainProgram


def measure(
  files: Sequence[str], params: Sequence[str], rounds: int
) -> dict[str, training.StepCost]:
  """Returns {experiment: cost of its training step}; ratios are to the first.

  Args:
    files: names of shipped experiments, such as 'cpu/code_rec', or paths of gin
      files; each configures a run.
    params: settings 'NAME = value' of all runs.
    rounds: number of times that each step is timed.

  Raises:
    ValueError: fewer than two files are given, a configuration is wrong or has
      a setting that nothing reads, its data are missing, or it trains agents,
      or a model with an encoder or with labels.
  """
  if len(set(files)) < 2:
    raise ValueError(
      'The benchmark experiments compares two or more. Give their names, such '
      'as cpu/code_slide cpu/code_rec.'
    )
  programs = {file: training_program(file, params) for file in files}
  return training.measure(programs, files[0], rounds)


def training_program(file: str, params: Sequence[str]) -> TrainProgram:
  """Returns the training program of an experiment; see `measure`."""
  shipped = not Path(file).is_file() and not file.startswith('experiments/')
  config.parse([f'experiments/{file}' if shipped else file], [*params])
  experiment = config.build(Experiment)()
  program = experiment.program
  if experiment.env or program.source_segment or program.model.head:
    raise ValueError(
      f'{file} trains agents, or a model with an encoder or with labels, whose '
      'steps are not compared. Remove it.'
    )
  _ = program.shapes  # Builds all layers, which read settings.
  config.check_read()
  return program
