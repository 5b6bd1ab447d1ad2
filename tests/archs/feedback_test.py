"""The Feedback Transformer against a loop over tokens of plain equations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs import feedback
from meliad_rec.archs.feedback import Feedback
from meliad_rec.layers import norms
from meliad_rec.layers import positions
from meliad_rec.recurrence.memory_scan import memory_scan
from tests import cells
from tests.architectures import B
from tests.architectures import config
from tests.architectures import D
from tests.architectures import H
from tests.architectures import K
from tests.cells import assert_close
from tests.cells import example
from tests.cells import forward
from tests.remembering import plain_scan

L, T, W = 2, 10, 4  # The loop is compiled token by token.
COMPOSITIONS = {
  'weighted sum': feedback.WeightedSum,
  'average': feedback.Average,
  'top': feedback.OneLayer,
  'embedding': functools.partial(feedback.OneLayer, 0),
  'own and below': feedback.OwnAndBelow,
}


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


# The published form is the first: weighted sums, and keys per layer.
QUICK = ('weighted sum', False), ('own and below', False)


@functools.cache
def parameters(compose, share_keys, **changes):
  return cells.parameters(make(compose, share_keys, **changes), example(T))


def norm(p, x):
  return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p['scale']


def attention(q_BHK, keys, values, seen):
  """Attends over a list of the memories of earlier tokens."""
  logits = [jnp.sum(q_BHK * k, -1) / K**0.5 for k in keys]
  weight = [jnp.exp(a) * m[:, None] for a, m in zip(logits, seen, strict=True)]
  total = sum(weight, jnp.zeros((B, H)))
  total = jnp.where(total > 0, total, 1)
  parts = [
    (w / total)[..., None] * v for w, v in zip(weight, values, strict=True)
  ]
  return sum(parts, jnp.zeros((B, H, K))).reshape(B, H * K)


def compose_of(name, p, hidden):
  mix = lambda weight, h: sum(
    w * x for w, x in zip(jax.nn.softmax(weight), h, strict=True)
  )
  match name:
    case 'weighted sum':
      return [mix(p['memory']['mix'], hidden)] * L
    case 'average':
      return [sum(hidden) / (L + 1)] * L
    case 'top':
      return [hidden[-1]] * L
    case 'embedding':
      return [hidden[0]] * L
    case 'own and below':
      return [
        mix(p['memory'][f'mix_{i}'], hidden[: i + 1]) for i in range(1, L + 1)
      ]


def loop(name, share_keys, p, x_BTD, mask_BT):
  keys, values, y = [[] for _ in range(L)], [[] for _ in range(L)], []
  for t in range(T):
    hidden = [x_BTD[:, t]]
    window = slice(max(t - W, 0), t)
    for i in range(L):
      layer, x = p[f'layers_{i}'], hidden[-1]
      n = norm(layer['attention']['norm'], x)
      q = n @ layer['attention']['query']['heads']['kernel']
      seen = list(mask_BT.T[window])
      h = attention(
        q.reshape(B, H, K), keys[i][window], values[i][window], seen
      )
      x = x + h @ layer['attention']['output']['linear']['kernel']
      n = norm(layer['mlp_norm'], x)
      hidden_BF = jax.nn.relu(n @ layer['mlp']['hidden']['kernel'])
      hidden.append(x + hidden_BF @ layer['mlp']['output']['linear']['kernel'])
    for i, m in enumerate(compose_of(name, p, hidden)):
      own = (
        p['memory_attention'] if share_keys else p[f'layers_{i}']['attention']
      )
      n = norm(own['norm'], m)
      keys[i].append((n @ own['key']['kernel']).reshape(B, H, K))
      values[i].append((n @ own['value']['kernel']).reshape(B, H, K))
    y.append(hidden[-1])
  return jnp.stack(y, 1)


@pytest.mark.parametrize(
  'compose, share_keys',
  [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in (
      *((name, True) for name in COMPOSITIONS),
      ('weighted sum', False),
      ('own and below', False),
    )
  ],
)
def test_it_is_the_loop(compose, share_keys):
  p, block = parameters(compose, share_keys), example(T)
  weight_BTD = np.random.default_rng(2).normal(size=(B, T, D))
  weight_BTD = weight_BTD * block.mask[..., None]

  def lean(p, x_BTD):
    cell = make(compose, share_keys)
    _, y = cell.apply({'params': p}, block.replace(x=x_BTD), method=forward)
    return jnp.sum(y * weight_BTD), y

  def plain(p, x_BTD):
    y = loop(compose, share_keys, p, x_BTD, block.mask)
    return jnp.sum(y * weight_BTD), y

  (d, y), (d_plain, y_plain) = (
    jax.jit(jax.grad(f, (0, 1), has_aux=True))(p, block.x)
    for f in (lean, plain)
  )
  assert_close(y * block.mask[..., None], y_plain * block.mask[..., None])
  jax.tree.map(assert_close, d, d_plain)


@pytest.mark.parametrize(
  'compose, share_keys',
  [
    ('weighted sum', False),
    pytest.param('weighted sum', True, marks=pytest.mark.slow),
    pytest.param('own and below', True, marks=pytest.mark.slow),
  ],
)
def test_dropout_is_that_of_the_plain_scan(compose, share_keys):
  """Memory is dropped equally whenever its keys are computed again."""
  p, block = parameters(compose, share_keys), example(T)
  cell = make(compose, share_keys, dropout=0.5).clone(span=4)
  state = cell.apply({'params': p}, B, method='initial_state')
  mask_BS = jnp.concatenate([state.mask_BA, block.mask], 1)
  facts = mask_BS, jax.random.key(7)

  def outcome(scan):
    def loss(p, memory, x_BTD):
      memory, y = scan(cell.pure(W), p, memory, x_BTD, facts)
      leaves = [*jax.tree.leaves(memory), y]
      return sum(jnp.sum(jnp.sin(a)) for a in leaves), y

    rng = np.random.default_rng(3)
    memory = jax.tree.map(lambda a: rng.normal(size=a.shape), state.written)
    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(p, memory, block.x)

  jax.tree.map(assert_close, outcome(memory_scan), outcome(plain_scan))


@pytest.mark.parametrize('share_keys', [False, True])
def test_memory_is_dropped_behind_the_norm_as_queries_are(share_keys):
  changes = {'norm': norms.NoNorm, 'dropout': 0.5}
  cell = make('weighted sum', share_keys, **changes)
  p = {'params': parameters('weighted sum', share_keys, **changes)}
  rng = jax.random.key(5)

  def entered(cell, x_BTD):
    shared = [cell.memory_attention] * L if share_keys else cell.layers
    return [each.pre_norm(x_BTD) for each in shared[: 1 if share_keys else L]]

  one = np.ones((B, 3, D), np.float32)
  kept = cell.apply(p, one, rngs={'dropout': rng}, method=entered)
  kv = cell.pure(W).keys(p['params'], [one], (None, rng))
  for i, (keep_BTD, (k, _)) in enumerate(zip(kept, kv, strict=True)):
    assert {*np.unique(keep_BTD)} == {0, 2}
    np.testing.assert_array_equal(keep_BTD, keep_BTD[:, :1].repeat(3, 1))
    of = 'memory_attention' if share_keys else f'layers_{i}'
    own = p['params'][of] if share_keys else p['params'][of]['attention']
    expected = (keep_BTD @ own['key']['kernel']).reshape(B, 3, H, K)
    np.testing.assert_allclose(k, expected, rtol=1e-4, atol=1e-5)


def test_the_lowest_layer_sees_the_highest():
  """With one layer and window 1, token t still depends on the first token."""
  cell = Feedback(config=config(window=1), count=1)
  block = example(T)
  init = jax.jit(lambda r: cell.init(r, block, method=forward))
  p = init(jax.random.key(0))
  y = jax.jit(functools.partial(cell.apply, p, method=forward))
  other = block.replace(x=block.x + (np.arange(T) == 0)[:, None])
  changed_T = np.abs(y(block)[1] - y(other)[1])[0].max(-1)
  assert (changed_T > 0).all()


def test_a_token_cannot_see_itself():
  with pytest.raises(ValueError, match='include_self is set'):
    Feedback(config=config(include_self=True), count=1).init(
      jax.random.key(0), example(T), method=forward
    )


def test_there_is_no_such_layer():
  compose = functools.partial(feedback.OneLayer, 3)
  with pytest.raises(ValueError, match='OneLayer.layer'):
    cell = Feedback(config=config(), count=L, compose=compose)
    init = functools.partial(cell.init, method=forward)
    jax.eval_shape(init, jax.random.key(0), example(T))


MEMORY_B, MEMORY_T, MEMORY_D, MEMORY_L = 2, 3, 5, 3
HIDDEN = list(
  np.random.default_rng(0).normal(
    size=(MEMORY_L + 1, MEMORY_B, MEMORY_T, MEMORY_D)
  )
)


def written(module, *weights):
  names = (
    ['mix'] if len(weights) == 1 else [f'mix_{i + 1}' for i in range(MEMORY_L)]
  )
  params = dict(zip(names, weights, strict=False)) if weights else {}
  found = module().apply({'params': params}, HIDDEN)
  assert len(found) == module().arrays(MEMORY_L)
  return found


def mixed(weight, hidden):
  share = np.exp(weight) / np.exp(weight).sum()
  return sum(s * h for s, h in zip(share, hidden, strict=True))


def close(a, b):
  np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_weighted_sum_is_of_all_layers():
  weight = np.array([0.3, -1.0, 2.0, 0.0])
  (found,) = written(feedback.WeightedSum, jnp.asarray(weight))
  close(found, mixed(weight, HIDDEN))


def test_an_average_counts_the_embedding():
  close(written(feedback.Average)[0], np.mean(HIDDEN, 0))


@pytest.mark.parametrize('layer', [-1, 0, 2])
def test_one_layer(layer):
  one = functools.partial(feedback.OneLayer, layer)
  close(written(one)[0], HIDDEN[layer])


@pytest.mark.parametrize('layer', [-MEMORY_L - 2, MEMORY_L + 1])
def test_a_layer_that_is_not_there(layer):
  with pytest.raises(ValueError, match='OneLayer.layer'):
    written(functools.partial(feedback.OneLayer, layer))


def test_own_and_below_is_blind_to_what_is_above():
  weights = [np.arange(i + 1.0) for i in range(1, MEMORY_L + 1)]
  found = written(feedback.OwnAndBelow, *(jnp.asarray(w) for w in weights))
  for i, (array, weight) in enumerate(zip(found, weights, strict=True)):
    close(array, mixed(weight, HIDDEN[: i + 2]))
