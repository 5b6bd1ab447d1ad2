"""The Recurrent Memory Transformer against plain equations on one sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.recurrent_memory import RecurrentMemory
from meliad_rec.layers import positions
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import run
from tests.architectures import B
from tests.architectures import config
from tests.architectures import D
from tests.architectures import H
from tests.architectures import K
from tests.architectures import S
from tests.architectures import T
from tests.architectures import W
from tests.cells import assert_close

COUNT = 2


def example():
  rng = np.random.default_rng(0)
  mask_BT = np.ones((B, T), bool)
  mask_BT[1, T - 3 :] = False
  mask_BT[2, 5] = False
  return Block(rng.normal(size=(B, T, D)).astype(np.float32), mask_BT)


def model(**changes):
  return RecurrentMemory(config(**changes), COUNT, S)


def forward(cell, block):
  return run(cell, cell.initial_state(B), block)


@functools.cache
def parameters():
  init = jax.jit(functools.partial(model().init, method=forward))
  rng = np.random.default_rng(1)
  moved = lambda a: a + rng.normal(size=a.shape).astype(np.float32) * 0.2
  return jax.tree.map(moved, init(jax.random.key(0), example())['params'])


def norm(p, x):
  return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p['scale']


def heads(p, x, unit=True):
  y = (x @ p['kernel']).reshape(*x.shape[:2], H, K)
  if unit:
    y = y / jnp.sqrt((y**2).sum(-1, keepdims=True) + 1e-6)
  return y


def layer(p, x, mask):
  """Computes a causal layer over a whole sequence."""
  a, length = p['attention'], x.shape[1]
  n = norm(a['norm'], x)
  q = heads(a['query']['heads'], n) * jnp.abs(a['query']['scale'])[:, None]
  back = np.arange(length)[:, None] - np.arange(length)
  bucket = positions.t5_bucket(np.maximum(back, 1), 32, 128)
  logits = jnp.einsum('bthk,bshk->bhts', q, heads(a['key'], n))
  seen = (back > 0) & mask[:, None, None]
  weights = jnp.exp(logits + a['position']['table'][:, bucket]) * seen
  total = weights.sum(-1, keepdims=True)
  weights = weights / jnp.where(total > 0, total, 1)
  y = jnp.einsum('bhts,bshk->bthk', weights, heads(a['value'], n, unit=False))
  x = x + y.reshape(*x.shape[:2], -1) @ a['output']['linear']['kernel']
  hidden = jnp.maximum(norm(p['mlp_norm'], x) @ p['mlp']['hidden']['kernel'], 0)
  return x + hidden @ p['mlp']['output']['linear']['kernel']


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
    memory = norm(params['norm'], x[:, S + W :])
  return memory, jnp.concatenate(outputs, 1)


def test_is_one_causal_sequence_a_block():
  """Compares values, and gradients of parameters and inputs."""
  block = example()
  rng = np.random.default_rng(3)
  weights = rng.normal(size=(B, S, D)), rng.normal(size=(B, T, D))

  def outcome(f):
    def loss(params, x_BTD):
      memory, y_BTD = f(params, block.replace(x=x_BTD))
      found = memory, y_BTD * block.mask[..., None]
      terms = map(jnp.multiply, found, weights)
      return sum(map(jnp.sum, terms)), found

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(parameters(), block.x)

  def lean(params, block):
    return model().apply({'params': params}, block, method=forward)

  jax.tree.map(assert_close, outcome(lean), outcome(slow))


def test_the_summary_is_the_memory():
  state = jnp.ones((B, S, D))
  assert model().memory_slots(state) is state
  assert (
    model().causal and model().is_recurrent and not model().needs_whole_document
  )


def test_memory_is_float32_whatever_activations_are():
  apply = functools.partial(
    model(dtype='bfloat16').apply, {'params': parameters()}
  )
  block = example().replace(x=example().x.astype(jnp.bfloat16))
  state, y = apply(block, method=forward)
  assert state.dtype == jnp.float32 and y.dtype == jnp.bfloat16


@pytest.mark.parametrize('count, slots', [(0, S), (COUNT, 0)])
def test_layers_and_slots_are_needed(count, slots):
  with pytest.raises(ValueError, match='SLOTS and LAYERS'):
    RecurrentMemory(config(), count, slots).init(
      jax.random.key(0), example(), method=forward
    )
