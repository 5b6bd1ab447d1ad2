"""The flags that name a trained run, for the commands that use one."""

from pathlib import Path

from absl import flags
from absl import logging

from meliad_rec.data.dataset import Dataset
from meliad_rec.distributed import compilation_cache
from meliad_rec.report import console
from meliad_rec.runs.trained_run import load_run
from meliad_rec.runs.trained_run import TrainedRun


def define_flags() -> None:
  flags.DEFINE_string('workdir', None, 'Folder of the run that was trained.')
  flags.DEFINE_string(
    'step', None, "Step of a checkpoint, or 'best'; default: the newest."
  )
  flags.DEFINE_bool(
    'trusted',
    False,
    'Let the configuration in --workdir import and call any code; only for '
    'folders whose writer you trust.',
  )


def open_run() -> TrainedRun:
  """The run that the flags name.

  Raises:
    ValueError: they name none.
  """
  args = flags.FLAGS
  if not args.workdir:
    raise ValueError('Which run? Give --workdir=DIR, the folder of one.')
  step = args.step
  if step not in (None, 'best'):
    if not step.isdecimal():
      raise ValueError(
        f"--step is {step!r}; give the number of a checkpoint's step, or best."
      )
    step = int(step)
  console.plain()
  compilation_cache.enable()
  return load_run(args.workdir, step, args.trusted)


def check_split(run: TrainedRun, data: Dataset) -> None:
  """Says so if the run's own data are no longer those of its training."""
  known = run.validation
  if known and data.documents('validation').identity != known:
    logging.warning(
      'The data have changed since the run began. Where splits follow from the '
      'names of all documents, some of this one may have been trained on; put '
      'the data back as they were, or give others.'
    )


def read_text(path: str | Path) -> str:
  """The text of a file; ValueError if it cannot be read or is not UTF-8."""
  try:
    return Path(path).read_bytes().decode()
  except OSError as error:
    raise ValueError(
      f'{path} cannot be read ({error.strerror}); give the path of a text file.'
    ) from None
  except UnicodeDecodeError as error:
    raise ValueError(
      f'{path} is not UTF-8 (byte {error.start}); convert it.'
    ) from None
