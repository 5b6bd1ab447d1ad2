"""Untrained runs of the tiny architectures, which read text."""

import functools

import jax

from meliad_rec.config.saved import SavedConfig
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.distributed.partition import make_mesh
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from meliad_rec.models.sharded_model import ShardedModel
from meliad_rec.runs.trained_run import TrainedRun
from tests import architectures as tiny

SEGMENT = 16


@functools.cache
def translator(name: str) -> TrainedRun:
  """Returns a run whose layers, of one kind, attend to an encoder's output."""
  make = {'feedback': tiny.feedback, 'window': tiny.windowed}[name]
  cell = (
    make(changes={'cross': True}) if name == 'feedback' else make(cross=True)
  )
  return untrained(
    Model(Bytes().size, cell, tiny.D, encoder=tiny.transformer(causal=False))
  )


@functools.cache
def run(name: str, labels: bool = False) -> TrainedRun:
  """Returns a run of one of tiny.ARCHITECTURES with random parameters."""
  cell = tiny.ARCHITECTURES[name].cell()
  return untrained(Model(Bytes().size, cell, tiny.D), labels)


def untrained(model: Model, labels: bool = False) -> TrainedRun:
  mesh = make_mesh(devices=jax.devices()[:1])
  make = jax.jit(lambda rng: initialize(model, rng, 1, SEGMENT))
  params = make(jax.random.key(0))
  facts = {'batch': 1, 'labels': labels}
  sharded = ShardedModel(model, mesh, SEGMENT)
  config = SavedConfig('', 'config.gin')
  return TrainedRun(sharded, params, Bytes(), config, facts, 0)
