"""A tiny run, trained once for all tests that open it."""

import atexit
import functools
from pathlib import Path
import shutil
import tempfile

from meliad_rec.config import config
from meliad_rec.runs import folder as run_folder
from meliad_rec.training import trainer
from meliad_rec.training.experiment import Experiment
from tests import tiny_run

STEPS = 4


@functools.cache
def folder() -> Path:
  """Returns the folder of a run with averaged parameters, without its data."""
  top = Path(tempfile.mkdtemp(prefix='trained'))
  atexit.register(shutil.rmtree, top, ignore_errors=True)
  tiny_run.write_store(top / 'store')
  bindings = {
    'STORE': repr(str(top / 'store')),
    'BATCH': 8,
    'STEPS': STEPS,
    'SAVE_EVERY': 2,
    'EVAL_EVERY': 4,
    'SAMPLE': 0,
    'LAYERS': 2,
    'RECURRENT_LAYERS': (-1,),
    'experiment.Experiment.ema_decay': 0.9,
  }
  config.parse(
    ['arch/block_recurrent', 'size/test', 'task/store'],
    [f'{name} = {value}' for name, value in bindings.items()],
  )
  experiment = config.build(Experiment)()
  run = trainer.Run(experiment, str(top / 'run'), {})
  run.begin()
  run.live()
  run_folder.write(top / 'run', experiment, config.operative())
  config.reset()
  shutil.move(top / 'store', top / 'moved')
  return top / 'run'


def store() -> Path:
  """Returns the folder that the data of the run were moved to."""
  return folder().parent / 'moved'
