"""Settings that architectures refuse by name, and dtypes of their states."""

import functools

import jax
import jax.numpy as jnp
import pytest

from meliad_rec.archs import feedback
from meliad_rec.archs.block_recurrent import BlockRecurrentLayer
from meliad_rec.archs.latent_bottleneck import Chunks
from meliad_rec.archs.lstm import LSTM
from meliad_rec.archs.memorizing import MemorizingLayer
from meliad_rec.archs.recurrent_memory import RecurrentMemory
from meliad_rec.archs.stack import Repeat
from meliad_rec.archs.transformer import Encoder
from meliad_rec.archs.window import WindowLayer
from meliad_rec.layers.positions import NoPosition
from meliad_rec.layers.positions import RelativeKeys
from meliad_rec.layers.positions import T5Bias
from meliad_rec.recurrence.halt import Halt
from tests import architectures as tiny
from tests import cells
from tests.architectures import config
from tests.architectures import D
from tests.architectures import H
from tests.architectures import S
from tests.architectures import W


def memorizing(memory=2 * W, neighbors=5, room=3 * W, **options):
  return MemorizingLayer(config(), memory, neighbors, room, **options)


def recurrent(slots=S, gate_config='skip'):
  return BlockRecurrentLayer(config(), slots, gate_config=gate_config)


def one_layer(layer):
  compose = functools.partial(feedback.OneLayer, layer)
  return tiny.feedback(compose=compose)


def universal(**changes):
  return Encoder(tiny.universal().clone(**changes), W)


def bottleneck(**changes):
  return tiny.bottleneck(tiny.transformer(memory=True)).clone(**changes)


REFUSED = {
  'BACKWARD_SPAN': [
    lambda: tiny.feedback().clone(span=0),
    lambda: tiny.staircase().clone(span=-32),
  ],
  'BLOCK': [lambda: Encoder(tiny.transformer(), 0)],
  'Chunks.length or': [
    lambda: Chunks(tiny.windowed()),
    lambda: Chunks(tiny.windowed(), length=4, count=2),
    lambda: Chunks(tiny.windowed(), length=0),
    lambda: Chunks(tiny.windowed(), count=-1),
  ],
  'DROPOUT': [lambda: Encoder(tiny.transformer(), W, dropout=1.0)],
  'HALT_THRESHOLD': [lambda: Halt(threshold=0.0), lambda: Halt(threshold=1.0)],
  'LatentBottleneck.chunk': [lambda: Chunks(bottleneck(), length=W)],
  'LAYER_DROP': [lambda: universal(layer_drop=1.0)],
  'LAYERS': [
    lambda: tiny.windowed(0),
    lambda: Encoder(tiny.transformer(0)),
    lambda: RecurrentMemory(config(), 0, S),
    lambda: tiny.feedback().clone(count=0),
    lambda: tiny.block_feedback().clone(count=0),
  ],
  'MEMORY': [lambda: memorizing(memory=W + 1)],
  'NEIGHBORS': [
    lambda: memorizing(neighbors=0),
    lambda: memorizing(neighbors=2 * W + 1),
  ],
  'OneLayer.layer': [lambda: one_layer(3), lambda: one_layer(-4)],
  'PASSES': [lambda: tiny.staircase(3)],
  'PONDER_COST': [lambda: Halt(ponder_cost=-0.1)],
  'RECURRENT_LAYERS': [
    lambda: tiny.block_feedback().clone(recurrent_at=()),
    lambda: tiny.recurrent(3, (3,)),
    lambda: tiny.recurrent(3, (-4,)),
    lambda: tiny.recurrent(3, (1, -2)),
  ],
  'REPEATS': [lambda: Repeat(tiny.windowed(), 0)],
  'SEGMENT': [lambda: memorizing(room=W + 1)],
  'SLOTS': [
    lambda: recurrent(slots=0),
    lambda: RecurrentMemory(config(), 2, 0),
    lambda: bottleneck(slots=0),
  ],
  'Set DEPTH and EVAL_DEPTH': [
    lambda: universal(steps=0),
    lambda: universal(eval_steps=0),
  ],
  'Staircase.diagonal': [lambda: tiny.staircase(live=0, diagonal=True)],
  'Staircase.live': [
    lambda: tiny.staircase(live=5),
    lambda: tiny.staircase(live=-1),
  ],
  'Universal.inference': [lambda: universal(inference='for')],
  'WINDOW': [lambda: bottleneck(chunk=0)],
  'WRITERS': [lambda: bottleneck(writers=0)],
  'WRITER_MLP_DIM': [lambda: bottleneck(writer_mlp_dim=0)],
  'compat_meliad': [
    lambda: tiny.feedback({'compat_meliad': True}),
    lambda: tiny.staircase().clone(config=config(compat_meliad=True)),
  ],
  "gate_config .*'both'": [lambda: recurrent(gate_config='both')],
  'include_self': [lambda: tiny.feedback({'include_self': True})],
  'recall_target': [
    lambda: memorizing(recall_target=1.5),
    lambda: memorizing(neighbors=None, recall_target=0.9),
  ],
  'remat': [lambda: tiny.feedback(remat='full')],
  'BlockRecurrentLayer.sequential': [
    lambda: BlockRecurrentLayer(
      config(), S, gate_config='single', sequential=True
    )
  ],
  'Remove .*.unroll': [
    lambda: LSTM(D, unroll=2),
    lambda: tiny.feedback().clone(unroll=2),
    lambda: memorizing().clone(unroll=2),
  ],
  'stack.layers.position': [
    lambda: tiny.stack.layers(
      2, tiny.windowed, scan=True, position=functools.partial(T5Bias, H)
    ),
    lambda: tiny.stack.layers(
      *(2, lambda position: WindowLayer(config(), position=position)),
      *(lambda: recurrent(), (-1,)),
      position=functools.partial(RelativeKeys, H),
    ),
    lambda: tiny.stack.layers(
      2,
      functools.partial(WindowLayer, config(position=NoPosition)),
      position=functools.partial(RelativeKeys, H),
    ),
  ],
  'stack.layers.special': [
    lambda: tiny.stack.layers(3, tiny.windowed, special_at=(1,)),
    lambda: tiny.stack.layers(3, tiny.windowed, tiny.windowed),
  ],
}


@pytest.mark.parametrize('name', REFUSED)
def test_impossible_settings_are_refused_by_name(name):
  for make in REFUSED[name]:
    with pytest.raises(ValueError, match=name):
      cells.shapes(make())


@pytest.mark.parametrize(
  'cell, dtypes',
  [
    (LSTM(D, dtype='bfloat16'), {'float32'}),
    (RecurrentMemory(config(dtype='bfloat16'), 2, S), {'float32'}),
    (
      tiny.LatentBottleneck(
        tiny.encoder_config(dtype='bfloat16'),
        tiny.transformer(memory=True, dtype='bfloat16'),
        *(S, 2, W),
      ),
      {'float32'},
    ),
    # A ring has the dtype of activations.
    (
      memorizing().clone(config=config(dtype='bfloat16')),
      {'bfloat16', 'bool', 'int32'},
    ),
  ],
)
def test_memory_that_is_added_to_stays_float32(cell, dtypes):
  block = cells.example()
  block = block.replace(x=jnp.asarray(block.x, 'bfloat16'))
  init = functools.partial(cell.init_with_output, method=cells.forward)
  (state, y_BTD), _ = jax.eval_shape(init, jax.random.key(0), block)
  assert {a.dtype.name for a in jax.tree.leaves(state)} == dtypes
  assert y_BTD.dtype == jnp.bfloat16
