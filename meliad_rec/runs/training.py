"""Trains a run in its folder, from a program or a notebook.

files = ['arch/block_recurrent', 'size/tiny', 'task/code']
run = meliad_rec.train(files, ['STEPS = 100'], 'runs/tiny')
"""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import os
import pathlib

from absl import logging

from meliad_rec.config import config
from meliad_rec.config.values import check_count
from meliad_rec.config.values import check_path
from meliad_rec.data import store
from meliad_rec.distributed import compilation_cache
from meliad_rec.report import console
from meliad_rec.runs import exported
from meliad_rec.runs import folder
from meliad_rec.runs import initial
from meliad_rec.runs.agent_run import AgentRun
from meliad_rec.runs.agent_run import load_agent
from meliad_rec.runs.trained_run import load_run
from meliad_rec.runs.trained_run import TrainedRun
from meliad_rec.storage.checkpoints import Checkpoints
from meliad_rec.storage.workdir import check_writable
from meliad_rec.storage.workdir import place
from meliad_rec.training import profile
from meliad_rec.training import trainer
from meliad_rec.training.experiment import Experiment


def train(
  gin_files: Sequence[str | os.PathLike[str]],
  gin_params: Sequence[str],
  workdir: str | os.PathLike[str],
  *,
  stop_at: int | None = None,
  init_from: str | os.PathLike[str] | None = None,
) -> TrainedRun | AgentRun:
  """Trains a model, or resumes training where it stopped.

  It does what `meliad-rec train` does. An interrupt saves and stops; the next
  call with the same folder resumes.

  Args:
    gin_files: names or paths of gin files, such as 'arch/window': one of
      experiments/, or one each of arch/, size/ and task/; any of options/; a
      file of scale/ to make an experiment smaller.
    gin_params: single settings, 'NAME = value', which override the files.
    workdir: folder of the run; created if it does not exist.
    stop_at: step at which to stop, if it is before STEPS.
    init_from: folder of a run or of an exported model with whose parameters a
      new run begins. None: random initial parameters.

  Returns:
    The run, at its newest checkpoint.

  Raises:
    ValueError: a setting is wrong, the folder holds something else, or a loss
      is not finite.
  """
  for name, value in ('gin_files', gin_files), ('gin_params', gin_params):
    if isinstance(value, str):
      raise ValueError(f'{name} must be a list of strings, got {value!r}.')
  if stop_at is not None:
    check_count('stop_at', stop_at, 1)
  check_path('workdir', workdir)
  workdir = os.fspath(workdir)
  console.use_plain_logs()
  compilation_cache.enable()
  source = open_source(init_from and os.fspath(init_from), workdir)
  config.parse([*map(os.fspath, gin_files)], list(gin_params))
  check_writable(place(workdir))
  experiment = build(workdir, source)
  if stop_at is not None:
    experiment = dataclasses.replace(experiment, stop_at=stop_at)
  run_experiment(experiment, workdir, source=source)
  # The caller chose the code that the configuration names.
  if experiment.env is not None:
    return load_agent(workdir, trusted=True)
  return load_run(workdir, trusted=True)


@contextlib.contextmanager
def advising(workdir: str | pathlib.Path | None) -> Iterator[None]:
  """Adds advice to the message of a user's mistake in a `with` body.

  The advice comes from folder.left_behind, if there is any.

  Args:
    workdir: folder of the run; None if there is none.
  """
  try:
    yield
  except ValueError as error:
    advice = workdir and folder.left_behind(workdir)
    if not (advice and config.sentence(error)):
      raise
    raise ValueError(f'{error} {advice}') from error


def open_source(
  init_from: str | None, workdir: str | None
) -> initial.Source | None:
  """Opens the run or model that --init_from names.

  Returns None if --init_from is not given. Also returns None if the run in
  workdir already has a checkpoint, because training continues from that.

  Raises:
    ValueError: the source cannot be opened, or workdir holds an exported model
      or a token store.
  """
  if workdir and (place(workdir) / store.MANIFEST).is_file():
    raise ValueError(
      f'{workdir} holds a token store, and a run needs a folder of its own. '
      'Give another --workdir.'
    )
  if workdir and exported.is_in(place(workdir)):
    raise ValueError(
      f'{workdir} holds an exported model. To train from it, add '
      f'--init_from={workdir}, and give another --workdir.'
    )
  if not init_from:
    return None
  if workdir:
    steps = Checkpoints(place(workdir) / folder.CHECKPOINTS)
    if (newest := steps.latest()) is not None:
      logging.info(
        'This run continues from its own step %d; --init_from=%s is not read.',
        newest,
        init_from,
      )
      return None
  return initial.Source(init_from)


def build(
  workdir: str | pathlib.Path | None, source: initial.Source | None = None
) -> Experiment:
  """Builds the experiment that the configuration describes.

  Args:
    workdir: folder of the run; None if there is none.
    source: as in `run_experiment`.

  Raises:
    ValueError: a setting is wrong or is not read, or agents are to begin with
      other parameters.
  """
  with advising(workdir):
    experiment = config.build(Experiment)()
    _ = experiment.program.shapes  # Builds all layers, which read settings.
    config.check_read()
  if source and experiment.env is not None:
    raise ValueError(
      'Agents begin with random parameters. Remove --init_from (in Python, '
      'init_from).'
    )
  return experiment


def run_experiment(
  experiment: Experiment,
  workdir: str | pathlib.Path,
  traced: range = range(0),
  source: initial.Source | None = None,
) -> tuple[trainer.Run, str | None]:
  """Trains a new run, or resumes the run in the folder.

  Args:
    experiment: built by `build`; the run saves the configuration.
    workdir: folder of the run.
    traced: steps to trace with the profiler.
    source: run or model whose parameters a new run begins with. None: random
      initial parameters.

  Returns:
    (run, reason why training stopped before the last step). The reason is None
    if training reached the last step.

  Raises:
    ValueError: the folder holds another run, the source does not fit, or a loss
      is not finite.
  """
  operative = config.operative()
  fill = source and (
    lambda params: source.fill(params, experiment.data.vocabulary)
  )
  with advising(workdir):
    run = trainer.Run(experiment, str(workdir), {'config': operative}, fill)
  run.profile = profile.Profile(run.workdir / 'profile', traced)

  def write():
    saved = run.workdir / folder.CONFIG
    # A run that trains no further keeps the settings that it was trained with.
    if run.finished and saved.is_file():
      return
    if run.step:
      log_changes(saved, operative)
    folder.write(run.workdir, experiment, operative)

  try:
    run.begin()
    return run, run.live(write)
  except OSError as error:
    # Not a wrong setting: a disk or bucket failed, and may recover.
    error.exit_code = 1
    raise


def log_changes(path: pathlib.Path, operative: str) -> None:
  """Logs the settings that differ from those of the last start.

  Args:
    path: config.gin that the last start of the run wrote.
    operative: the current configuration, from config.operative.
  """
  if not path.is_file():
    return
  try:
    changes = config.differences(path.read_text(encoding='utf-8'), operative)
  except ValueError as error:
    logging.warning(
      'The settings cannot be compared with the run so far: %s', error
    )
    return
  for line in changes:
    logging.warning('changed since the last start: %s', line)
