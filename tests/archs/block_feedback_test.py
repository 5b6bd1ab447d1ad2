"""Block feedback: every layer reads the states of the previous block."""

import functools

import jax
import numpy as np
import pytest

from meliad_rec.archs.block_feedback import BlockFeedback
from meliad_rec.archs.block_recurrent import BlockRecurrentLayer
from meliad_rec.layers.attention import KV
from meliad_rec.layers.layer import Layer
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import run
from tests.architectures import B
from tests.architectures import config
from tests.architectures import D
from tests.architectures import S
from tests.architectures import T
from tests.architectures import W

REAL = np.ones((B, T), bool)


def example():
  rng = np.random.default_rng(0)
  return Block(rng.normal(size=(B, T, D)).astype(np.float32), REAL)


def forward(cell, block):
  return run(cell, cell.initial_state(B), block)


@functools.cache
def built(at=(1,)):
  cell = BlockFeedback(config(), count=3, recurrent_at=at, slots=S)
  init = jax.jit(functools.partial(cell.init, method=forward))
  return cell, init(jax.random.key(0), example())['params']


def slow(params, at):
  """Computes each block layer by layer, calling each part by itself."""
  plain = Layer(config(), has_memory=True)
  layer = BlockRecurrentLayer(config(), S)
  recurrent = jax.jit(layer.apply)
  of = lambda i: {'params': params[f'layers_{i}']}
  states = {i: layer.apply(of(i), B, method='initial_state') for i in at}
  pasts = {i: config().empty_past(B) for i in range(3) if i not in at}

  def look(cell, s_BSD):
    return cell.states.kv(cell.states.pre_norm(s_BSD))

  @jax.jit
  def read(params, block, past, memory: KV):
    def call(m):
      n = m.pre_norm(block.x)
      kv = past.append(m.kv(n, block.mask))
      return kv.last(W), m(block.x, n, kv, memory)

    return plain.apply({'params': params['params']['layer']}, method=call)

  outputs = []
  for begin in range(0, T, W):
    block = jax.tree.map(lambda a: a[:, begin : begin + W], example())
    # Of the last recurrent layer, before this block's update.
    memory = layer.apply(of(at[-1]), states[at[-1]][1], method=look)
    for i in range(3):
      if i in at:
        states[i], y = recurrent(of(i), states[i], block)
      else:
        pasts[i], y = read(of(i), block, pasts[i], memory)
      block = block.replace(x=y)
    outputs.append(block.x)
  return {**states, **pasts}, np.concatenate(outputs, 1)


@pytest.mark.parametrize(
  'at', [pytest.param((1,), marks=pytest.mark.slow), (0, 1)]
)
def test_is_the_loop(at):
  cell, params = built(at)
  apply = jax.jit(functools.partial(cell.apply, method=forward))
  state, y = apply({'params': params}, example())
  expected_state, expected = slow(params, at)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
  close(y, expected)
  for i, s in enumerate(state):
    jax.tree.map(close, s, expected_state[i])


def test_needs_a_recurrent_layer():
  cell = BlockFeedback(config(), count=3, recurrent_at=(), slots=S)
  with pytest.raises(ValueError, match='RECURRENT_LAYERS'):
    cell.init(jax.random.key(0), example(), method=forward)


def test_layers_above_are_computed_again_too():
  """Each layer above adds products to those of the backward pass."""
  _, params = built((0,))

  def products(remat):
    cell = BlockFeedback(config(), 3, (0,), S, remat=remat)

    def loss(p):
      return cell.apply({'params': p}, example(), method=forward)[1].sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(params))
    return text.count('= dot_general'), text.count('prevent_cse=True')

  plain, barriers = products('none')
  again, more_barriers = products('full')
  assert again > plain
  # The last steps of the layer that feeds back, and the two layers above.
  assert more_barriers - barriers == 3
