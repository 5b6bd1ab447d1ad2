"""Answers to a plan, without compiling."""

import dataclasses

from meliad_rec.planning.estimate import Exchange
from meliad_rec.planning.estimate import TimeShare
from meliad_rec.planning.measure import Compiled
from meliad_rec.planning.measure import Sizes
from meliad_rec.planning.question import Answer

GIB = 2**30
SIZES = Sizes(
  mesh={'data': 4, 'fsdp': 1, 'model': 2},
  hosts=2,
  batch=32,
  segment=1024,
  steps=7200,
  parameters=123_456_789,
  flops=8 * 197e12 / 4,
  held={
    'parameters': GIB // 2,
    'optimizer': GIB // 4,
    'carry': 0,
    'average': 0,
    'batch': 2**20,
  },
)
COMPILED = Compiled(
  arguments=GIB,
  temporary=3 * GIB,
  code=GIB // 4,
  needed=4 * GIB + GIB // 4,
  compile_seconds=2.5,
  exchanges=[
    Exchange('all-reduce', 'data', 3, 5 * 2**20, 0.125),
    Exchange('all-to-all', 'model', 2, 2**20, 0.125),
  ],
  parts=[
    TimeShare('products', 'forward cell/mlp', 0.5),
    TimeShare('collectives', 'over data', 0.25),
    TimeShare('kernels', 'forward cell/attention', 0.125),
    TimeShare('copies', 'forward cell/mlp', 0.125),
  ],
  notes=('a loop counts once',),
)


def fitting(topology: str = 'v5e:2x4') -> Answer:
  """A step of a second, at a quarter of the peak."""
  return Answer(
    topology=topology,
    hbm=15.75 * GIB,
    sizes=dataclasses.asdict(SIZES),
    compiled=dataclasses.asdict(COMPILED),
    needed=COMPILED.needed,
    missing=None,
    notes=COMPILED.notes,
    remat='--gin_file=options/remat/full',
  )


def too_large(topology: str = 'v5e:2x4') -> Answer:
  """A step that needs 20 GiB."""
  return dataclasses.replace(
    fitting(topology), compiled=None, needed=20 * GIB, missing='too large'
  )


def unknown(topology: str = 'v5e:2x4') -> Answer:
  """What is known without libtpu."""
  return dataclasses.replace(
    fitting(topology), compiled=None, needed=None, missing='no libtpu'
  )
