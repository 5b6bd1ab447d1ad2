"""The list of tiny models over which every law is tested.

Sizes are all different, so that a swapped axis fails. B is 8 only where a test
shards; T holds three windows.
"""

from collections.abc import Callable
from collections.abc import Collection
import dataclasses
import functools

import jax.numpy as jnp
import pytest

from meliad_rec.archs import block_recurrent
from meliad_rec.archs import feedback as feedback_memory
from meliad_rec.archs import stack
from meliad_rec.archs import window
from meliad_rec.archs.block_feedback import BlockFeedback
from meliad_rec.archs.feedback import Feedback
from meliad_rec.archs.latent_bottleneck import LatentBottleneck
from meliad_rec.archs.lstm import LSTM
from meliad_rec.archs.memorizing import MemorizingLayer
from meliad_rec.archs.recurrent_memory import RecurrentMemory
from meliad_rec.archs.stack import Repeat
from meliad_rec.archs.staircase import Staircase
from meliad_rec.archs.transformer import Encoder
from meliad_rec.archs.transformer import EncoderLayers
from meliad_rec.archs.universal import Universal
from meliad_rec.layers import gates
from meliad_rec.layers import positions
from meliad_rec.layers import positions as span
from meliad_rec.layers.encoder_layer import EncoderLayer
from meliad_rec.layers.experts import Experts
from meliad_rec.layers.layer_config import EncoderConfig
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.models.cell import Cell
from meliad_rec.models.laws import Laws
from meliad_rec.models.model import Model
from meliad_rec.recurrence.halt import Halt

B, T, W, D, H, K, F, S, V = 3, 24, 8, 20, 2, 10, 28, 5, 31

CONFIG = LayerConfig(d_model=D, num_heads=H, head_dim=K, mlp_dim=F, window=W)


def config(**changes) -> LayerConfig:
  return dataclasses.replace(CONFIG, **changes)


def encoder_config(causal=True, **changes) -> EncoderConfig:
  sizes = {'d_model': D, 'num_heads': H, 'head_dim': K, 'mlp_dim': F}
  return EncoderConfig(**sizes, causal=causal, **changes)


def windowed(layers=2, keeps_inputs=False, **changes):
  make = functools.partial(
    window.WindowLayer, config(**changes), keeps_inputs=keeps_inputs
  )
  return stack.layers(layers, make)


def recurrent(layers=3, at=(1,), scan=False, changes=None, **options):
  settings = config(**(changes or {}))
  return stack.layers(
    layers,
    functools.partial(window.WindowLayer, settings),
    functools.partial(
      block_recurrent.BlockRecurrentLayer, settings, slots=S, **options
    ),
    at,
    scan,
  )


def block_feedback(**options):
  return BlockFeedback(
    config(), count=3, recurrent_at=(-2,), slots=S, **options
  )


def feedback(changes=None, **options):
  return Feedback(config=config(**(changes or {})), count=2, **options)


def memorizing(memory=2 * W, neighbors=5, room=W, **options):
  return stack.layers(
    3,
    functools.partial(window.WindowLayer, config()),
    functools.partial(
      MemorizingLayer, config(), memory, neighbors, room, **options
    ),
    (1,),
  )


def staircase(passes=4, **options):
  settings = config(include_self=True)
  return Staircase(config=settings, count=2, passes=passes, **options)


def transformer(count=2, memory=False, **changes):
  layer = functools.partial(EncoderLayer, encoder_config(**changes), memory)
  return EncoderLayers(layer, count)


def universal(gated=False, memory=False, experts=None, **options):
  """Returns a UT, or a GUT if `gated`; its tokens halt at different steps."""
  layer = EncoderLayer(encoder_config(), memory, gated, experts)
  halt = Halt(threshold=0.99, bias_init=-0.5)
  settings = {'global_halt': gated, 'transition': gated, 'halt': halt}
  return Universal(layer, 6, **settings | options)


def bottleneck(encoder):
  return LatentBottleneck(
    encoder_config(), encoder, slots=S, writers=2, chunk=W
  )


@dataclasses.dataclass(frozen=True)
class Architecture:
  """One row of the list.

  Attributes:
    cell: makes the tiny cell.
    gin: the file in gin/arch that builds it.
    has_state: whether anything is carried from block to block.
    recurrent: whether `clear` forgets something.
    forgets_all: whether `clear` forgets the whole state; then it has no cache.
  """

  cell: Callable[[], Cell]
  gin: str
  has_state: bool = True
  recurrent: bool = False
  forgets_all: bool = False


ARCHITECTURES = {
  'vanilla': Architecture(
    lambda: stack.layers(2, lambda: window.VanillaLayer(config())),
    'vanilla',
    has_state=False,
  ),
  'window': Architecture(windowed, 'window'),
  'window_keeps_inputs': Architecture(
    lambda: windowed(keeps_inputs=True), 'window'
  ),
  'window_scanned': Architecture(
    lambda: stack.layers(3, lambda: window.WindowLayer(config()), scan=True),
    'window',
  ),
  'window_rope': Architecture(
    lambda: windowed(position=positions.RoPE, include_self=True), 'window'
  ),
  'window_alibi': Architecture(
    lambda: windowed(position=positions.ALiBi), 'window'
  ),
  'window_unnormalised': Architecture(
    lambda: windowed(position=positions.NoPosition, normalize_qk=False),
    'window',
  ),
  'recurrent_fixed_skip': Architecture(
    recurrent, 'block_recurrent', recurrent=True
  ),
  'recurrent_fixed_single': Architecture(
    lambda: recurrent(gate_config='single'), 'block_recurrent', recurrent=True
  ),
  'recurrent_lstm_dual': Architecture(
    lambda: recurrent(gate=gates.LSTMGate, gate_config='dual'),
    'block_recurrent',
    recurrent=True,
  ),
  'recurrent_sequential': Architecture(
    lambda: recurrent(gate=gates.LSTMGate, gate_config='dual', sequential=True),
    'block_recurrent',
    recurrent=True,
  ),
  'recurrent_in_scan': Architecture(
    lambda: recurrent(hoist=False, remat='full', unroll=2),
    'block_recurrent',
    recurrent=True,
  ),
  'recurrent_twice_scanned': Architecture(
    lambda: recurrent(4, (-3, -2), scan=True), 'block_recurrent', recurrent=True
  ),
  'recurrent_shared_keys': Architecture(
    lambda: recurrent(2, (0,), changes={'num_kv_heads': 1}),
    'block_recurrent',
    recurrent=True,
  ),
  'recurrent_compat': Architecture(
    lambda: recurrent(
      gate=gates.LSTMGate, gate_config='dual', changes={'compat_meliad': True}
    ),
    'block_recurrent',
    recurrent=True,
  ),
  'block_feedback': Architecture(
    block_feedback, 'block_feedback', recurrent=True
  ),
  'window_relative_keys': Architecture(
    lambda: windowed(position=positions.RelativeKeys, normalize_qk=False),
    'window',
  ),
  'window_span': Architecture(
    lambda: windowed(span=functools.partial(span.AdaptiveSpan, ramp=3)),
    'window',
  ),
  'memorizing': Architecture(memorizing, 'memorizing', recurrent=True),
  'memorizing_all': Architecture(
    lambda: memorizing(memory=W, neighbors=None, room=2 * W, tile=4),
    'memorizing',
    recurrent=True,
  ),
  'memorizing_approximate': Architecture(
    lambda: memorizing(recall_target=0.9, remat='full'),
    'memorizing',
    recurrent=True,
  ),
  'lstm': Architecture(
    lambda: stack.layers(2, lambda: LSTM(D)),
    'lstm',
    recurrent=True,
    forgets_all=True,
  ),
  'repeated': Architecture(
    lambda: Repeat(windowed(), 3, share=True), 'repeated'
  ),
  'repeated_recurrent': Architecture(
    lambda: Repeat(recurrent(2, (0,)), 3, share=True),
    'repeated',
    recurrent=True,
  ),
  'recurrent_memory': Architecture(
    lambda: RecurrentMemory(config(), 2, S),
    'recurrent_memory',
    recurrent=True,
    forgets_all=True,
  ),
  'feedback': Architecture(
    feedback, 'feedback', recurrent=True, forgets_all=True
  ),
  'feedback_own_and_below': Architecture(
    lambda: feedback(
      {'position': positions.RelativeKeys, 'span': span.AdaptiveSpan},
      compose=feedback_memory.OwnAndBelow,
      share_keys=False,
      share_position=False,
    ),
    'feedback',
    recurrent=True,
    forgets_all=True,
  ),
  'staircase': Architecture(
    staircase, 'staircase', recurrent=True, forgets_all=True
  ),
  'staircase_by_chunks': Architecture(
    lambda: staircase(live=3, diagonal=False),
    'staircase',
    recurrent=True,
    forgets_all=True,
  ),
  'cached_staircase': Architecture(
    lambda: staircase(2, live=1), 'staircase', recurrent=True, forgets_all=True
  ),
  'memory_network': Architecture(
    lambda: staircase(live=0), 'staircase', recurrent=True, forgets_all=True
  ),
  'transformer': Architecture(
    lambda: Encoder(transformer(), W), 'transformer', has_state=False
  ),
  'universal': Architecture(
    lambda: Encoder(universal(), W), 'universal', has_state=False
  ),
  'gated_universal': Architecture(
    lambda: Encoder(universal(gated=True), W),
    'gated_universal',
    has_state=False,
  ),
  'sparse_universal': Architecture(
    lambda: Encoder(universal(experts=Experts(4, 2)), W),
    'universal',
    has_state=False,
  ),
  'latent_bottleneck': Architecture(
    lambda: bottleneck(transformer(memory=True)),
    'latent_bottleneck',
    recurrent=True,
    forgets_all=True,
  ),
  'gated_latent_bottleneck': Architecture(
    lambda: bottleneck(universal(gated=True, memory=True)),
    'gated_latent_bottleneck',
    recurrent=True,
    forgets_all=True,
  ),
}


# At least one of each file of archs/. Laws of the others are slow tests.
QUICK = {
  *('vanilla', 'window', 'recurrent_fixed_skip', 'block_feedback'),
  *('memorizing', 'lstm', 'repeated', 'recurrent_memory', 'feedback'),
  *('staircase', 'transformer', 'universal', 'gated_universal'),
  'latent_bottleneck',
}


def each(
  fits: Callable[[Architecture], bool] = lambda a: True,
  quick: Collection[str] = QUICK,
) -> list:
  """Names of the rows that fit, for pytest; slow except for the quick ones."""
  return [
    name if name in quick else pytest.param(name, marks=pytest.mark.slow)
    for name, architecture in ARCHITECTURES.items()
    if fits(architecture)
  ]


@functools.cache
def build(name: str) -> Laws:
  """A tiny model with its parameters, compiled once."""
  return Laws(Model(V, ARCHITECTURES[name].cell(), D), B, T)


ALL, NONE = jnp.ones(B, bool), jnp.zeros(B, bool)


def real(tokens_BT):
  """A mask without padding."""
  return jnp.ones(tokens_BT.shape, bool)
