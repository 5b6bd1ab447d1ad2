"""The model: logits, heads, resets, initialization."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from meliad_rec.archs import stack
from meliad_rec.archs.window import WindowLayer
from meliad_rec.distributed.partition import BATCH_AXES
from meliad_rec.distributed.partition import make_mesh
from meliad_rec.distributed.partition import param_spec
from meliad_rec.distributed.partition import path_string
from meliad_rec.layers import norms
from meliad_rec.layers import positions
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.models import pooling
from meliad_rec.models.cell import Cell
from meliad_rec.models.embedding import AdaptiveEmbedding
from meliad_rec.models.embedding import UntiedEmbedding
from meliad_rec.models.heads import Classifier
from meliad_rec.models.heads import Matcher
from meliad_rec.models.model import empty_carry
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from tests import architectures

V, D, B, T = 13, 6, 3, 5


class Adder(Cell):
  """State: the sum of inputs, plus 1."""

  def initial_state(self, batch):
    return jnp.ones((batch, D))

  def __call__(self, state, block):
    y_BTD = state[:, None] + jnp.cumsum(block.x, 1)
    return y_BTD[:, -1], y_BTD

  @property
  def is_recurrent(self):
    return True

  def clear(self, state):
    return jnp.zeros_like(state)


TOKENS = np.random.default_rng(0).integers(1, V, (B, T))
REAL = np.ones((B, T), bool)


def built(**options):
  model = Model(V, Adder(), D, **options)
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
  vocab, width, num_heads = 26, 256, 4
  config = LayerConfig(
    d_model=width,
    num_heads=num_heads,
    head_dim=64,
    mlp_dim=1024,
    window=100,
    normalize_qk=False,
    norm=norms.LayerNorm,
    mlp_bias=True,
    depth=layers,
  )
  cell = stack.layers(
    layers,
    functools.partial(WindowLayer, config),
    position=functools.partial(positions.RelativeKeys, num_heads),
  )
  model = Model(
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
  with pytest.raises(ValueError, match='clear_state'):
    initialize(
      Model(V, window, architectures.D, clear_state=True),
      *(jax.random.key(0), B, architectures.T),
    )


def test_steps_are_the_segment():
  model, params = built()
  state = model.apply(params, B, method='initial_state')
  end, logits = model.apply(params, state, TOKENS, np.ones(B, bool), REAL)
  opened = model.apply(params, state, method='to_decode_state')
  for t in range(T):
    opened, logits_BV = model.apply(
      params, opened, TOKENS[:, t], method='decode_step'
    )
    np.testing.assert_allclose(logits_BV, logits[:, t], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(
    model.apply(params, opened, method='to_segment_state'), end, rtol=1e-5
  )


def test_dropout_comes_before_the_logits_and_needs_an_rng():
  model, params = built(dropout=0.5)
  state, start = np.ones((B, D), np.float32), np.zeros(B, bool)
  call = lambda **o: model.apply(params, state, TOKENS, start, REAL, **o)
  end, plain = call()
  dropped_end, dropped = call(rngs={'dropout': jax.random.key(1)})
  np.testing.assert_array_equal(end, dropped_end)
  assert (plain != dropped).any()


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

  model = Model(V, Spy(), D, dtype='bfloat16')
  params = initialize(model, jax.random.key(0), B, T)
  assert set(seen) == {jnp.dtype('bfloat16')}
  _, logits = model.apply(
    {'params': params}, np.ones((B, D)), TOKENS, np.ones(B, bool), REAL
  )
  assert logits.dtype == jnp.float32


class Noter(Adder):
  """Cell that is not causal, with two memory slots."""

  @property
  def causal(self):
    return False

  def memory_slots(self, state):
    return jnp.stack([state, 3 - state], 1)


def test_a_model_of_the_next_token_must_not_see_it():
  with pytest.raises(ValueError, match='CAUSAL'):
    initialize(Model(V, Noter(), D), jax.random.key(0), B, T)
  head = Classifier(3, None)
  assert initialize(Model(V, Noter(), D, head=head), jax.random.key(0), B, T)


def test_a_head_divides_no_logits():
  model = Model(V, Adder(), D, logits_divisor=2.0, head=Classifier(3))
  with pytest.raises(ValueError, match='logits_divisor'):
    initialize(model, jax.random.key(0), B, T)


def test_a_head_takes_no_parameters_for_logits_of_tokens():
  for embedding in (
    UntiedEmbedding,
    functools.partial(AdaptiveEmbedding, cutoffs=(2,), tied=False),
  ):
    model = Model(V, Adder(), D, embedding=embedding, head=Classifier(3))
    with pytest.raises(ValueError, match='options/embedding/untied'):
      initialize(model, jax.random.key(0), B, T)


def head_of(params, h):
  """Computes the logits of labels 1, 2, ... in NumPy."""
  for name in 'hidden', 'output':
    h = h @ params['head'][name]['kernel'] + params['head'][name]['bias']
    h = np.maximum(h, 0) if name == 'hidden' else h
  return h


def test_a_head_judges_normed_outputs_and_slots():
  for pool in pooling.Mean(), pooling.Slots():
    model = Model(V, Noter(), D, head=Classifier(3, pool))
    params = initialize(model, jax.random.key(0), B, T)
    assert set(params) == {'embed', 'head', 'norm'}
    params['norm']['scale'] = params['norm']['scale'] + np.arange(D)
    carry = empty_carry(model, params, B)
    state, logits = model.apply(
      {'params': params}, carry, TOKENS, np.ones(B, bool), REAL
    )
    y = 1 + np.cumsum(params['embed']['embedding'][TOKENS], 1)
    np.testing.assert_allclose(state['cell'], y[:, -1], rtol=1e-5)
    h = np.stack([y[:, -1], 3 - y[:, -1]], 1) if pool.at_end else y
    pooled = (normed(h) * (1 + np.arange(D))).mean(1)
    expected = head_of(params, pooled)
    np.testing.assert_allclose(logits[:, -1, 1:], expected, rtol=1e-3)
    assert set(state) == set(carry) == {'cell', 'head'}


def pairs(**options):
  """Returns a model of pairs and its parameters."""
  model = Model(V, Adder(), D, head=Matcher(3, pooling.Last()), **options)
  return model, initialize(model, jax.random.key(0), B, 2 * T)


PAIRS = np.random.default_rng(1).integers(1, V, (B, 2 * T))
PAIRED = np.ones((B, 2 * T), bool)


def test_the_halves_of_a_row_are_read_as_two_sequences():
  model, params = pairs()
  carry = empty_carry(model, params, B)
  assert carry['cell'].shape == carry['head'].shape == (B, 2, D)
  carry = jax.tree.map(lambda a: a + 2, carry)
  start = np.array([True, False, False])
  state, logits = model.apply({'params': params}, carry, PAIRS, start, PAIRED)
  begin = np.where(start, 1, 2)[:, None, None]
  x = params['embed']['embedding'][PAIRS].reshape(B, 2, T, D)
  y = begin + x.sum(2)
  np.testing.assert_allclose(state['cell'], y, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(state['head'], normed(y), rtol=1e-4, atol=1e-5)
  u, v = normed(y).swapaxes(0, 1)
  features = np.concatenate([u, v, u * v, np.abs(u - v)], -1)
  expected = head_of(params, features)[:, None]
  np.testing.assert_allclose(
    logits[..., 1:], np.repeat(expected, 2 * T, 1), rtol=1e-3, atol=1e-4
  )


class Strict(Adder):
  """Cell that outputs the rows of its state."""

  def to_decode_state(self, state):
    assert state.shape == (2 * B, D)
    return state + 1

  def to_segment_state(self, state):
    assert state.shape == (2 * B, D)
    return state - 1

  def clear(self, state):
    assert state.shape == (2 * B, D)
    return 0 * state


def test_a_cell_is_asked_about_rows_of_single_sequences():
  model, params = pairs()
  model = model.clone(cell=Strict())
  state = jax.tree.map(
    lambda a: a + np.arange(a.size).reshape(a.shape),
    empty_carry(model, params, B),
  )
  for name, cell in (
    ('to_decode_state', state['cell'] + 1),
    ('to_segment_state', state['cell'] - 1),
    ('clear', 0 * state['cell']),
  ):
    changed = model.apply({'params': params}, state, method=name)
    np.testing.assert_array_equal(changed['cell'], cell)
    np.testing.assert_array_equal(changed['head'], state['head'])


def test_clear_state_keeps_the_pool():
  model, params = pairs(clear_state=True)
  none = np.zeros(B, bool)
  empty = np.zeros_like(PAIRED)
  seven = np.full((B, 2, D), 7, np.float32)
  state = {'cell': seven, 'head': seven}
  after, _ = model.apply({'params': params}, state, PAIRS, none, empty)
  np.testing.assert_array_equal(after['head'], state['head'])


@pytest.mark.parametrize(
  ('cell', 'segment', 'block'),
  [(Adder(), 7, 2), (architectures.recurrent(1, (0,)), 24, 16)],
)
def test_halves_of_a_segment_are_whole_blocks(cell, segment, block):
  model = Model(V, cell, architectures.D, head=Matcher(3))
  with pytest.raises(ValueError, match=f'{block} .* {segment}. Set SEGMENT'):
    initialize(model, jax.random.key(0), B, segment)


def test_pairs_of_many_devices_are_those_of_one():
  rows = 8
  model = Model(V, Adder(), D, head=Matcher(3))
  params = initialize(model, jax.random.key(0), rows, 2 * T)
  rng = np.random.default_rng(2)
  tokens = rng.integers(1, V, (rows, 2 * T))
  mask = rng.random((rows, 2 * T)) < 0.8
  start = np.arange(rows) % 3 == 0
  carry = jax.tree.map(lambda a: a + 1, empty_carry(model, params, rows))
  apply = jax.jit(model.apply)
  expected = apply({'params': params}, carry, tokens, start, mask)
  mesh = make_mesh(fsdp=2, model=2)
  place = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
  put = jax.device_put((carry, tokens, start, mask), place)
  places = jax.tree_util.tree_map_with_path(
    lambda path, a: NamedSharding(
      mesh, param_spec(mesh, path_string(path), a.shape)
    ),
    params,
  )
  found = apply({'params': jax.device_put(params, places)}, *put)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
  jax.tree.map(close, found, expected)
