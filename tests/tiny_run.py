"""A tiny run, to be started, stopped and resumed many times."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np

from meliad_rec.data import store
from meliad_rec.data.documents import Document
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.distributed.partition import make_mesh
from meliad_rec.generation.sample import Sample
from meliad_rec.metrics import losses
from meliad_rec.models.model import Model
from meliad_rec.training import optimizer
from meliad_rec.training import schedules
from meliad_rec.training.experiment import Experiment
from meliad_rec.training.program import TrainProgram
from tests import architectures as tiny
from tests import quick_xla

ROOT = pathlib.Path(__file__).parents[1]
ROWS, SEGMENT = 4, 16


def write_store(path, seed=0):
  """Writes a store of a few random documents of a few segments each."""
  rng = np.random.default_rng(seed)

  def document(name, length):
    letters = rng.integers(ord('a'), ord('z'), length)
    text = ''.join(map(chr, np.where(letters % 5 == 0, ord(' '), letters)))
    ids = Bytes().encode(text)
    return Document(name, ids, len(text), len(text.split()))

  splits = {
    'train': [document(f't{i}', 50 + 17 * i) for i in range(9)],
    'validation': [document(f'v{i}', 40 + 21 * i) for i in range(3)],
    'test': [document('x', 30)],
  }
  return store.write(path, splits, Bytes(), 'random letters')


@functools.cache
def program(devices=1, fsdp=1, model=1, **changes) -> TrainProgram:
  """Returns a program, which is compiled once for all tests."""
  settings = {
    'model': Model(
      Bytes().size, tiny.recurrent(1, (0,), changes={'dropout': 0.1}), tiny.D
    ),
    'optimizer': optimizer.chain(optimizer.adamw, schedules.constant(0.01)),
    'objective': losses.objective,
    'rows': 8 if devices > 1 else ROWS,
    'segment': SEGMENT,
    'ema_decay': 0.9,
  }
  mesh = make_mesh(fsdp=fsdp, model=model, devices=jax.devices()[:devices])
  return TrainProgram(**settings | changes, mesh=mesh)


def experiment(data, program, **changes) -> Experiment:
  """Returns an experiment that runs a compiled program."""
  settings = {
    'model': None,
    'data': data,
    'optimizer': program.optimizer,
    'batch': program.rows,
    'segment': program.segment,
    'steps': 6,
    'log_every': 1,
    'eval_every': 3,
    'save_every': 2,
    'ema_decay': program.ema_decay,
    'sample': Sample(length=0),
  }
  made = Experiment(**settings | changes)
  made.__dict__['program'] = program
  return made


def command(workdir, data, *params):
  """Returns the command line of a run of size/test on a store."""
  bindings = {
    'STORE': repr(str(data)),
    'LAYERS': 2,
    'RECURRENT_LAYERS': '(-1,)',
    'LOG_EVERY': 1,
    'SAMPLE': 0,
    # A schedule that does not depend on STEPS.
    'WARMUP_STEPS': 1000,
    'meliad_rec.training.schedules.rsqrt.total_steps': None,
  } | dict(params)
  return [
    *(sys.executable, '-m', 'meliad_rec.main', f'--workdir={workdir}'),
    *('--gin_file=arch/block_recurrent', '--gin_file=size/test'),
    *('--gin_file=task/store', '--verbose'),
    *(f'--gin_param={name} = {value}' for name, value in bindings.items()),
  ]


def environment(**more):
  """Returns the environment of a process on one device.

  It keeps compiled programs where these tests keep theirs (conftest.py).
  """
  return os.environ | {
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': ' '.join(quick_xla.FLAGS),
    'PYTHON': sys.executable,
    'PYTHONPATH': str(ROOT),
    **more,
  }


def run(arguments, **more):
  """Runs a process to its end; its output is text."""
  return subprocess.run(
    arguments,
    env=environment(**more),
    cwd='/',
    capture_output=True,
    text=True,
    timeout=600,
  )
