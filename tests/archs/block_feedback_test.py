"""Block feedback: every layer reads the states of the previous block."""

import functools

import jax
import numpy as np

from meliad_rec.archs.block_feedback import BlockFeedback
from meliad_rec.archs.block_recurrent import BlockRecurrentLayer
from meliad_rec.layers.attention import KV
from meliad_rec.layers.layer import Layer
from tests import cells
from tests.architectures import B
from tests.architectures import config
from tests.architectures import S
from tests.architectures import T
from tests.architectures import W
from tests.cells import assert_close
from tests.cells import example

COUNT, AT = 4, (0, 2)
CELL = BlockFeedback(config(), COUNT, AT, S)
PARAMS = functools.cache(lambda: cells.parameters(CELL))


def slow(params):
  """Computes each block layer by layer, calling each part by itself."""
  plain = Layer(config(), has_memory=True)
  layer = BlockRecurrentLayer(config(), S)
  recurrent = jax.jit(layer.apply)
  of = lambda i: {'params': params[f'layers_{i}']}
  states = [
    layer.apply(of(i), B, method='initial_state')
    if i in AT
    else config().empty_past(B)
    for i in range(COUNT)
  ]

  @jax.jit
  def look(params, s_BSD):
    method = lambda cell: cell.states.kv(cell.states.pre_norm(s_BSD))
    return layer.apply(params, method=method)

  @jax.jit
  def read(params, past, block, memory: KV):
    def call(m):
      n = m.pre_norm(block.x)
      kv = past.append(m.kv(n, block.mask))
      return kv.last(W), m(block.x, n, kv, memory)

    return plain.apply({'params': params['params']['layer']}, method=call)

  outputs = []
  for begin in range(0, T, W):
    block = cells.part(example(), begin, begin + W)
    # Of the last recurrent layer, before this block's update.
    memory = look(of(AT[-1]), states[AT[-1]][1])
    for i, state in enumerate(states):
      if i in AT:
        states[i], y = recurrent(of(i), state, block)
      else:
        states[i], y = read(of(i), state, block, memory)
      block = block.replace(x=y)
    outputs.append(block.x)
  return tuple(states), np.concatenate(outputs, 1)


def test_is_the_loop():
  assert_close(cells.apply(CELL, PARAMS(), example()), slow(PARAMS()))


def test_layers_above_are_computed_again_too():
  """Each layer above adds products to those of the backward pass."""

  def products(remat):
    cell = CELL.clone(remat=remat)

    def loss(p):
      return cell.apply({'params': p}, example(), method=cells.forward)[1].sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(PARAMS()))
    return text.count('= dot_general'), text.count('prevent_cse=True')

  plain, barriers = products('none')
  again, more_barriers = products('full')
  assert again > plain
  # The last steps of the layer that feeds back, and the layer above.
  assert more_barriers - barriers == 2
