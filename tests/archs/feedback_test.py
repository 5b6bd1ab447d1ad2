"""The Feedback Transformer against a loop over tokens of plain equations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs import feedback
from meliad_rec.archs.feedback import Feedback
from meliad_rec.archs.memory_cell import floats
from meliad_rec.layers import norms
from meliad_rec.layers import positions
from meliad_rec.layers.attention import KV
from meliad_rec.recurrence.memory_scan import memory_scan
from tests import cells
from tests import plain_layer
from tests.architectures import B
from tests.architectures import config
from tests.architectures import D
from tests.architectures import H
from tests.architectures import K
from tests.cells import assert_close
from tests.cells import example
from tests.plain_layer import heads
from tests.plain_layer import norm
from tests.remembering import plain_scan

L, T, W = 2, 10, 4
COMPOSITIONS = {
  'weighted sum': feedback.WeightedSum,
  'own and below': feedback.OwnAndBelow,
}
slow = pytest.mark.slow


def make(compose, share_keys, **changes):
  plain = {
    'position': positions.NoPosition,
    'normalize_qk': False,
    'window': W,
  }
  return Feedback(
    config=config(**(plain | changes)),
    count=L,
    compose=COMPOSITIONS[compose],
    share_keys=share_keys,
  )


@functools.cache
def parameters(compose, share_keys, **changes):
  return cells.parameters(make(compose, share_keys, **changes), example(T))


@functools.partial(jax.jit, static_argnums=0)
def compose_of(name, p, hidden):
  mix = lambda weight, h: sum(
    w * x for w, x in zip(jax.nn.softmax(weight), h, strict=True)
  )
  if name == 'weighted sum':
    return [mix(p['mix'], hidden)] * L
  return [mix(p[f'mix_{i}'], hidden[: i + 1]) for i in range(1, L + 1)]


@jax.jit
def read(p, x, k, v, seen_B1S):
  n = norm(p['attention']['norm'], x)
  q = heads(p['attention']['query']['heads'], n) / K**0.5
  return plain_layer.output(p, x, plain_layer.attention(q, k, v, seen_B1S))


@jax.jit
def write(p, m, keys, values):
  n = norm(p['norm'], m)
  pairs = zip((keys, values), ('key', 'value'), strict=True)
  return [
    jnp.concatenate([a[:, 1:], heads(p[name], n)], 1) for a, name in pairs
  ]


def loop(name, share_keys, p, block):
  """Before a document, memory is zeros that nothing sees."""
  memory = [[jnp.zeros((B, W, H, K))] * 2] * L
  mask_BS = np.pad(block.mask, ((0, 0), (W, 0)))
  y = []
  for t in range(T):
    hidden, seen_B1S = [block.x[:, t : t + 1]], mask_BS[:, None, t : t + W]
    layers = [p[f'layers_{i}'] for i in range(L)]
    for layer, kv in zip(layers, memory, strict=True):
      hidden.append(read(layer, hidden[-1], *kv, seen_B1S))
    written = compose_of(name, p['memory'], hidden)
    memory = [
      write(p['memory_attention'] if share_keys else layer['attention'], m, *kv)
      for layer, m, kv in zip(layers, written, memory, strict=True)
    ]
    y.append(hidden[-1])
  return (), jnp.concatenate(y, 1)


# The published form is the first: weighted sums, and keys per layer.
@pytest.mark.parametrize(
  'compose, share_keys',
  [
    ('weighted sum', False),
    ('own and below', False),
    pytest.param('weighted sum', True, marks=slow),
  ],
)
def test_it_is_the_loop(compose, share_keys):
  p, cell = parameters(compose, share_keys), make(compose, share_keys)

  def lean(p, block):
    return (), cell.apply({'params': p}, block, method=cells.forward)[1]

  plain = functools.partial(loop, compose, share_keys)
  expected = cells.outcome(plain, p, example(T), compiled=False)
  assert_close(cells.outcome(lean, p, example(T)), expected)


def test_what_else_a_token_may_write():
  """One layer, or the mean of all; the embedding counts."""
  hidden = [np.full((1, 2, 3), 2.0**i) for i in range(4)]
  for layer, expected in ((-1, 8), (0, 1), (2, 4)):
    (found,) = feedback.OneLayer(layer).apply({}, hidden)
    np.testing.assert_array_equal(found, np.full((1, 2, 3), expected))
  (found,) = feedback.Average().apply({}, hidden)
  np.testing.assert_allclose(found, np.full((1, 2, 3), 15 / 4))


@pytest.mark.slow
@pytest.mark.parametrize(
  'compose, share_keys', [('weighted sum', False), ('own and below', True)]
)
def test_dropout_is_that_of_the_plain_scan(compose, share_keys):
  """What is computed again in the backward pass is dropped as before."""
  p, block = parameters(compose, share_keys), example(T)
  rates = {'dropout': 0.5, 'attention_dropout': 0.4, 'hidden_dropout': 0.3}
  cell = make(compose, share_keys, **rates).clone(span=4)
  state = cell.apply({'params': p}, B, method='initial_state')
  mask_BS = jnp.concatenate([state.mask_BA, block.mask], 1)
  rng = np.random.default_rng(3)
  memory = jax.tree.map(lambda a: rng.normal(size=a.shape), state.written)

  def outcome(scan):
    def run(p, block):
      facts = mask_BS, jax.random.key(7), ()
      return scan(cell.pure(W), (p['p'], []), p['memory'], block.x, facts)

    return cells.outcome(run, {'p': p, 'memory': memory}, block)

  assert_close(outcome(memory_scan), outcome(plain_scan))


@pytest.mark.slow
def test_dropout_of_attention_to_a_source_is_that_of_the_plain_scan():
  cell = make('weighted sum', True, cross=True, attention_dropout=0.4)
  rng = np.random.default_rng(2)
  source = KV(*rng.normal(size=(2, B, 3, H, K)), np.ones((B, 3), bool))
  block = example(T).replace(source_kv=[source] * L)
  p = cells.parameters(cell, block)
  state = cell.apply({'params': p}, B, method='initial_state')
  mask_BS = jnp.concatenate([state.mask_BA, block.mask], 1)

  def outcome(scan):
    def run(p, block):
      facts = mask_BS, jax.random.key(7), block.sources
      both = p, floats(block.sources)
      body = cell.clone(span=4).pure(W)
      return scan(body, both, state.written, block.x, facts)

    return cells.outcome(run, p, block)

  assert_close(outcome(memory_scan), outcome(plain_scan))


def test_a_skipped_layer_repeats_its_input():
  """Also as a level of the memory, which then is the embedding."""
  p, block = parameters('weighted sum', True), example(T)
  cell = make('weighted sum', True).clone(layer_drop=1 - 1e-7)
  forward = functools.partial(cell.apply, {'params': p}, method=cells.forward)
  state, y_BTD = forward(block, rngs={'dropout': jax.random.key(0)})
  np.testing.assert_array_equal(y_BTD, block.x)
  assert_close(state.written[0], block.x[:, -W:])


@pytest.mark.parametrize('share_keys', [False, True])
def test_memory_is_dropped_behind_the_norm_as_queries_are(share_keys):
  changes = {'norm': norms.NoNorm, 'dropout': 0.5}
  cell = make('weighted sum', share_keys, **changes)
  p = {'params': parameters('weighted sum', share_keys, **changes)}
  rng = jax.random.key(5)

  def entered(cell, x_BTD):
    shared = [cell.memory_attention] if share_keys else cell.layers
    return [each.pre_norm(x_BTD) for each in shared]

  one = np.ones((B, 3, D), np.float32)
  kept = cell.apply(p, one, rngs={'dropout': rng}, method=entered)
  kv = cell.pure(W).keys((p['params'], []), [one], (None, rng))
  for i, (keep_BTD, (k, _)) in enumerate(zip(kept, kv, strict=True)):
    assert {*np.unique(keep_BTD)} == {0, 2}
    np.testing.assert_array_equal(keep_BTD, keep_BTD[:, :1].repeat(3, 1))
    of = 'memory_attention' if share_keys else f'layers_{i}'
    own = p['params'][of] if share_keys else p['params'][of]['attention']
    assert_close(k, heads(own['key'], keep_BTD))
