"""The language model: logits, resets, and how a run begins."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec import norms
from meliad_rec import positions
from meliad_rec.archs import stack
from meliad_rec.archs.window import WindowLayer
from meliad_rec.cell import Cell
from meliad_rec.embedding import UntiedEmbedding
from meliad_rec.layer_config import LayerConfig
from meliad_rec.model import empty_carry
from meliad_rec.model import initialize
from meliad_rec.model import LanguageModel
from tests import architectures

V, D, B, T = 13, 6, 3, 5


class Adder(Cell):
  """State: the sum of what was read, begun at 1."""

  def initial_state(self, batch):
    return jnp.ones((batch, D))

  def __call__(self, state, block):
    y_BTD = state[:, None] + jnp.cumsum(block.x, 1)
    return y_BTD[:, -1], y_BTD

  @property
  def recurs(self):
    return True

  def clear(self, state):
    return jnp.zeros_like(state)


TOKENS = np.random.default_rng(0).integers(1, V, (B, T))
REAL = np.ones((B, T), bool)


def built(**options):
  model = LanguageModel(V, Adder(), D, **options)
  return model, {'params': initialize(model, jax.random.key(0), B, T)}


def normed(y):
  return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize('divisor', [None, 4.0])
def test_logits_are_products_with_the_embedding(divisor):
  model, params = built(logits_divisor=divisor)
  table_VD = np.asarray(params['params']['embed']['embedding'])
  state = np.full((B, D), 2.0, np.float32)
  start = np.array([True, False, False])
  end, logits = model.apply(params, state, TOKENS, start, REAL)
  begin = np.where(start[:, None], 1, state)
  y = begin[:, None] + np.cumsum(table_VD[TOKENS], 1)
  expected = normed(y) @ table_VD.T / (divisor or D**0.5)
  np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(end, y[:, -1], rtol=1e-5)
  assert logits.dtype == jnp.float32


def test_another_embedding_and_another_norm():
  model, params = built(embedding=UntiedEmbedding, final_norm=norms.LayerNorm)
  draw = lambda a: np.random.default_rng(a.size).normal(size=a.shape)
  params = jax.tree.map(lambda a: draw(a).astype(np.float32), params)
  p, state = params['params'], np.zeros((B, D), np.float32)
  _, logits = model.apply(params, state, TOKENS, np.zeros(B, bool), REAL)
  y = np.cumsum(p['embed']['embedding'][TOKENS], 1)
  y = (y - y.mean(-1, keepdims=True)) / (y.std(-1, keepdims=True) + 1e-5)
  y = y * p['norm']['scale'] + p['norm']['bias']
  output = p['embed']['output']
  expected = y @ output['kernel'] + output['bias']
  np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)
  assert logits.dtype == jnp.float32


@pytest.mark.parametrize('layers, total', [(8, 6_330_138), (4, 3_175_194)])
def test_sizes_of_the_papers_transformer_xl(layers, total):
  """Fan et al. 2020 and Ju et al. 2021, as their code counts; 26 ids."""
  vocab, width, heads = 26, 256, 4
  config = LayerConfig(
    d_model=width,
    heads=heads,
    head_width=64,
    mlp_width=1024,
    window=100,
    normalize_qk=False,
    norm=norms.LayerNorm,
    mlp_bias=True,
    depth=layers,
  )
  cell = stack.layers(
    layers,
    functools.partial(WindowLayer, config),
    position=functools.partial(positions.RelativeKeys, heads),
  )
  model = LanguageModel(
    *(vocab, cell, width),
    embedding=UntiedEmbedding,
    final_norm=norms.LayerNorm,
  )
  shapes = jax.eval_shape(
    lambda rng: initialize(model, rng, 1, 64), jax.random.key(0)
  )
  found = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
  assert found == total


def test_clear_state_forgets_before_the_segment():
  model, params = built(clear_state=True)
  none = np.zeros(B, bool)
  run = lambda s: model.apply(params, np.full((B, D), s), TOKENS, none, REAL)[1]
  np.testing.assert_array_equal(run(1.0), run(7.0))


def test_clear_state_needs_something_to_clear():
  window = architectures.windowed()
  with pytest.raises(ValueError, match='Stack has no recurrent state to clear'):
    initialize(
      LanguageModel(V, window, architectures.D, clear_state=True),
      *(jax.random.key(0), B, architectures.T),
    )


def test_steps_are_the_segment():
  model, params = built()
  state = model.apply(params, B, method='initial_state')
  end, logits = model.apply(params, state, TOKENS, np.ones(B, bool), REAL)
  opened = model.apply(params, state, method='open')
  for t in range(T):
    opened, logits_BV = model.apply(params, opened, TOKENS[:, t], method='step')
    np.testing.assert_allclose(logits_BV, logits[:, t], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(
    model.apply(params, opened, method='close'), end, rtol=1e-5
  )


def test_dropout_comes_before_the_logits_and_needs_an_rng():
  model, params = built(dropout=0.5)
  state, start = np.ones((B, D), np.float32), np.zeros(B, bool)
  call = lambda **o: model.apply(params, state, TOKENS, start, REAL, **o)
  end, plain = call()
  dropped_end, dropped = call(rngs={'dropout': jax.random.key(1)})
  np.testing.assert_array_equal(end, dropped_end)
  assert (plain != dropped).any()


def test_embedding_starts_with_variance_1():
  model = LanguageModel(500, Adder(), D)
  params = initialize(model, jax.random.key(0), 1, 1)
  np.testing.assert_allclose(params['embed']['embedding'].std(), 1, atol=0.05)


def test_empty_carry_has_the_state_shapes():
  model, params = built()
  carry = empty_carry(model, params['params'], 4)
  assert carry.shape == (4, D)
  assert not carry.any()


def test_bfloat16_activations_and_float32_logits():
  seen = []

  class Spy(Adder):
    def __call__(self, state, block):
      seen.append(block.x.dtype)
      return super().__call__(state, block)

  model = LanguageModel(V, Spy(), D, dtype='bfloat16')
  params = initialize(model, jax.random.key(0), B, T)
  assert set(seen) == {jnp.dtype('bfloat16')}
  _, logits = model.apply(
    {'params': params}, np.ones((B, D)), TOKENS, np.ones(B, bool), REAL
  )
  assert logits.dtype == jnp.float32
