"""Tiny runs on expressions that halt, each trained once for all tests."""

import functools
from pathlib import Path
import tempfile

from meliad_rec.config import config
from meliad_rec.runs import folder as run_folder
from meliad_rec.training import trainer
from meliad_rec.training.experiment import Experiment

LONGEST, SEGMENT = 20, 24


@functools.cache
def folder(arch: str) -> Path:
  """Of a run of gin/arch/ARCH."""
  top = Path(tempfile.mkdtemp(prefix='halting'))
  bindings = {
    'TREES': 400,
    'MAX_LENGTH': LONGEST,
    'SEGMENT': SEGMENT,
    'BATCH': 8,
    'DEPTH': 7,
    'STEPS': 2,
    'SAVE_EVERY': 2,
    'EVAL_EVERY': 2,
  }
  config.parse(
    [f'arch/{arch}', 'size/test', 'task/listops'],
    [f'{name} = {value}' for name, value in bindings.items()],
  )
  experiment = config.build(Experiment)()
  run = trainer.Run(experiment, str(top), {})
  run.begin()
  run.live()
  run_folder.write(top, experiment, config.operative())
  config.reset()
  return top
