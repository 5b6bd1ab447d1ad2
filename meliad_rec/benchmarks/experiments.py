"""Compares training steps of any experiments, or their generation of text.

  meliad-rec bench experiments cpu/code_slide cpu/code_rec \\
    --gin_param="STORE = 'STORE'"
  meliad-rec bench experiments --generate \\
    feedback/table5_language_model_transformer \\
    feedback/table5_language_model_feedback --gin_param="CORPUS = 'PATH'"

Each row is a shipped experiment or a gin file. All models read random tokens.
"""

from collections.abc import Sequence
from pathlib import Path

from meliad_rec.benchmarks import generation
from meliad_rec.benchmarks import training
from meliad_rec.config import config
from meliad_rec.training.experiment import Experiment
from meliad_rec.training.program import TrainProgram


def measure(
  files: Sequence[str], params: Sequence[str], rounds: int
) -> dict[str, training.StepCost]:
  """Returns {experiment: cost of its training step}; ratios are to the first.

  Args:
    files, params: as in `training_programs`.
    rounds: number of times that each step is timed.

  Raises:
    ValueError: as in `training_programs`.
  """
  programs = training_programs(files, params)
  return training.measure(programs, files[0], rounds)


def measure_generation(
  files: Sequence[str], params: Sequence[str], rounds: int
) -> dict[str, generation.GenerationCost]:
  """Returns {experiment: cost of generating one text}.

  Ratios are to the first experiment. Parameters are random.

  Args:
    files, params: as in `training_programs`.
    rounds: number of times that each model is timed.

  Raises:
    ValueError: as in `training_programs`, or a model reads whole documents.
  """
  models = {
    file: (program.model, program.segment)
    for file, program in training_programs(files, params).items()
  }
  for file, (model, _) in models.items():
    if model.cell.needs_whole_document:
      raise ValueError(
        f'The model of {file} reads a whole document at once, and cannot '
        'generate text. Remove it.'
      )
  return generation.compare(models, files[0], 1, rounds)


def training_programs(
  files: Sequence[str], params: Sequence[str]
) -> dict[str, TrainProgram]:
  """Returns {experiment: its training program}.

  Args:
    files: names of shipped experiments, such as 'cpu/code_rec', or paths of gin
      files; each configures a run.
    params: settings 'NAME = value' of all runs.

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
  return {file: training_program(file, params) for file in files}


def training_program(file: str, params: Sequence[str]) -> TrainProgram:
  """Returns the training program of an experiment; see `training_programs`."""
  shipped = not Path(file).is_file() and not file.startswith('experiments/')
  config.parse([f'experiments/{file}' if shipped else file], [*params])
  experiment = config.build(Experiment)()
  program = experiment.program
  if experiment.env or program.source_segment or program.model.head:
    raise ValueError(
      f'{file} trains agents, or a model with an encoder or with labels, '
      'which are not compared. Remove it.'
    )
  _ = program.shapes  # Builds all layers, which read settings.
  config.check_read()
  return program
