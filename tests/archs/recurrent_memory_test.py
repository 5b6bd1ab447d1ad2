"""The Recurrent Memory Transformer against plain equations on one sequence."""

import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.recurrent_memory import RecurrentMemory
from meliad_rec.layers import positions
from tests import cells
from tests import plain_layer
from tests.architectures import B
from tests.architectures import config
from tests.architectures import S
from tests.architectures import T
from tests.architectures import W
from tests.plain_layer import heads
from tests.plain_layer import norm
from tests.plain_layer import unit

COUNT = 2


def layer(p, x, mask):
  """Computes a causal layer over a whole sequence."""
  a, length = p['attention'], x.shape[1]
  n = norm(a['norm'], x)
  scale_H1 = jnp.abs(a['query']['scale'])[:, None]
  q = unit(heads(a['query']['heads'], n)) * scale_H1
  back = np.arange(length)[:, None] - np.arange(length)
  bucket = positions.t5_bucket(np.maximum(back, 1), 32, 128)
  k, v = unit(heads(a['key'], n)), heads(a['value'], n)
  seen = (back > 0) & mask[:, None]
  bias = a['position']['table'][:, bucket]
  return plain_layer.output(p, x, plain_layer.attention(q, k, v, seen, bias))


def slow(params, block):
  """Computes section 3.2 of the paper, block by block."""
  memory = jnp.repeat(params['first'][None], B, 0)
  always, outputs = np.ones((B, S), bool), []
  for i in range(0, T, W):
    x = jnp.concatenate([memory, block.x[:, i : i + W], memory], 1)
    mask = np.concatenate([always, block.mask[:, i : i + W], always], 1)
    for l in range(COUNT):
      x = layer(params[f'layers_{l}']['layer'], x, mask)
    outputs.append(x[:, S : S + W])
    memory = x[:, S + W :]
    if 'norm' in params:
      memory = norm(params['norm'], memory)
  return memory, jnp.concatenate(outputs, 1)


@pytest.mark.parametrize('normalize', [True, False])
def test_is_one_causal_sequence_a_block(normalize):
  """Compares values, and gradients of parameters and inputs."""
  cell = RecurrentMemory(config(), COUNT, S, normalize=normalize)
  params, block = cells.parameters(cell), cells.example()
  cells.assert_close(*(cells.outcome(f, params, block) for f in (cell, slow)))
