"""The flags that name a trained run, for the commands that use one."""

import dataclasses

from absl import flags
from absl import logging

from meliad_rec.data.dataset import Dataset
from meliad_rec.data.documents import Documents
from meliad_rec.distributed import compilation_cache
from meliad_rec.models.checks import check_data_compatible
from meliad_rec.models.checks import least_segment
from meliad_rec.models.sharded_model import ShardedModel
from meliad_rec.runs import folder
from meliad_rec.runs import run_data
from meliad_rec.runs.trained_run import load_run
from meliad_rec.runs.trained_run import TrainedRun
from meliad_rec.storage.workdir import place

# Arguments that the help shows, besides flags.
ARGUMENTS = '[RUN]'


def define_flags() -> None:
  flags.DEFINE_string(
    'workdir', None, 'Folder of a trained run; the same as RUN.'
  )
  define_step_flags()


def take_arguments(argv: list[str]) -> None:
  """Takes a word that is not a flag as --workdir.

  Raises:
    ValueError: there are more words, or --workdir is given too.
  """
  if not argv[1:]:
    return
  if argv[2:] or flags.FLAGS.workdir:
    raise ValueError(
      f'{argv[-1]!r} is not a flag. Give the folder of one run, and other '
      'values as --flag=value.'
    )
  flags.FLAGS['workdir'].parse(argv[1])


def define_step_flags() -> None:
  """Defines --step and --trusted."""
  flags.DEFINE_string(
    'step', None, "Step of a checkpoint, or 'best'; default: the newest."
  )
  flags.DEFINE_bool(
    'trusted',
    False,
    'Let the configuration of the run import and call any code; only for '
    'runs from sources that you trust.',
  )


def define_data_flags() -> None:
  """Defines --split, and --store, --path and --split_file for its data."""
  flags.DEFINE_string('split', None, 'Split to read: validation, test, ...')
  flags.DEFINE_string(
    'store', None, "Token store that has --split; default: the run's own data."
  )
  flags.DEFINE_string(
    'path',
    None,
    "New path (folder, files or data_dir) of the run's own data; default: the "
    'path in training.',
  )
  flags.DEFINE_string(
    'split_file', None, "New path of the split file of the run's own data."
  )


def define_reading_flags() -> None:
  """Defines --batch and --segment, for commands that read documents."""
  flags.DEFINE_integer(
    'batch',
    None,
    'Number of documents read in parallel; affects only speed and memory; '
    'default: as in training.',
    lower_bound=1,
  )
  flags.DEFINE_integer(
    'segment',
    None,
    'Number of tokens read at once; default: as in training, or the length of '
    'the longest document if the model reads whole documents and that is more.',
    lower_bound=1,
  )


def with_segment(
  sharded: ShardedModel, documents: Documents, segment: int | None
) -> ShardedModel:
  """Returns the model of a run that reads segments of another length.

  Args:
    sharded: the model, with the segments of training.
    documents: documents that it will read.
    segment: value of --segment. None means as in training, or longer if the
      model reads whole documents.

  Raises:
    ValueError: the model cannot read these documents.
  """
  if segment is None:
    segment = max(sharded.segment, least_segment(sharded.model, documents))
  check_data_compatible(sharded.model, documents, segment, '--segment')
  return dataclasses.replace(sharded, segment=segment)


def open_run(workdir: str | None, average: int = 1) -> TrainedRun:
  """Opens a run at the checkpoint that --step names.

  Args:
    workdir: folder of the run; None is an error.
    average: see load_run.

  Raises:
    ValueError: workdir is None or is not a run, or --step has no checkpoint.
  """
  if not workdir:
    raise ValueError(
      'No run was given. Add --workdir=DIR, or just DIR, the folder of a run.'
    )
  compilation_cache.enable()
  return load_run(workdir, step(), flags.FLAGS.trusted, average)


def step() -> int | str | None:
  """Returns the value of --step; ValueError if it is neither step nor best."""
  text = flags.FLAGS.step
  if text in (None, 'best'):
    return text
  if not text.isdecimal():
    raise ValueError(
      f"--step must be the step of a checkpoint or 'best', got {text!r}."
    )
  return int(text)


def check_workdir(args) -> None:
  """Raises ValueError if --workdir is given and is not the folder of a run."""
  if args.workdir:
    folder.check_is_run(place(args.workdir))


def check_data_flags(args) -> None:
  """Checks that --store, --path and --split_file come only with --split.

  Raises:
    ValueError: one of them is given without --split.
  """
  names = ('store', 'path', 'split_file')
  given = [f'--{name}' for name in names if getattr(args, name)]
  if given and not args.split:
    raise ValueError(
      f'{" and ".join(given)} can only be used with the name of a split. Add '
      '--split.'
    )


def open_data(run: TrainedRun, args) -> Dataset:
  """Opens the data that the flags of `define_data_flags` name.

  Raises:
    ValueError: the data do not exist, or their vocabulary is not the run's.
  """
  data = run_data.open_data(run, args.store, args.path, args.split_file)
  if not args.store:
    check_split(run, data)
  return data


def check_split(run: TrainedRun, data: Dataset) -> None:
  """Warns if the validation split has changed since the run's training.

  Args:
    run: the run.
    data: the run's own data as they are now.
  """
  known = run.validation
  if known and data.documents('validation').identity != known:
    logging.warning(
      'The data have changed since the run began. If splits depend on the '
      'names of all documents, the model may have been trained on some of '
      'these documents. Restore the data, or give other data.'
    )
