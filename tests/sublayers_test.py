"""Attention and MLP against NumPy, and what compat_meliad changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec import gates
from meliad_rec import positions
from meliad_rec.attention import KV
from meliad_rec.sublayers import Attention
from meliad_rec.sublayers import FeedForward
from tests.architectures import config
from tests.architectures import D
from tests.architectures import F
from tests.architectures import H
from tests.architectures import K
from tests.architectures import W

B, T, S = 3, 11, 5


def draw(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def softmax(x):
  p = np.exp(x - x.max(-1, keepdims=True))
  return p / p.sum(-1, keepdims=True)


def attention(**changes):
  """The module, its parameters moved away from 1, and x_BTD."""
  module = Attention(config(**changes), has_memory=True)
  x_BTD = draw(B, T, D)

  def all_of_it(m):
    n = m.enter(x_BTD)
    past = m.config.empty_past(B).append(m.kv(n))
    heads = m.read_past(n, past), m.read_memory(n, m.kv(n))
    return m.write(x_BTD, *heads)

  params = jax.jit(lambda r: module.init(r, method=all_of_it))(
    jax.random.key(0)
  )['params']
  moved = lambda a: a * 1.5 if a.ndim == 1 else a
  return module, {'params': jax.tree.map(moved, params)}, x_BTD


def unit(y):
  return y / np.linalg.norm(y, axis=-1, keepdims=True)


def heads_of(kernel, x):
  return (x @ kernel).reshape(*x.shape[:2], H, K)


def read_past(module, params, n_BTD, past):
  return np.asarray(module.apply(params, n_BTD, past, method='read_past'))


@pytest.mark.parametrize('compat_meliad', [False, True])
@pytest.mark.parametrize('normalize_qk', [False, True])
def test_reading_the_past(compat_meliad, normalize_qk):
  module, params, x = attention(
    compat_meliad=compat_meliad, normalize_qk=normalize_qk
  )
  past = module.config.empty_past(B).append(
    module.apply(params, x, method='kv')
  )
  found = read_past(module, params, x, past)
  p = params['params']
  q = heads_of(p['query']['heads']['kernel'], x)
  k = heads_of(p['key']['kernel'], x)
  v = heads_of(p['value']['kernel'], x)
  scale_H = np.full(H, K**-0.5)
  bias_scale_H = np.ones(H)
  if normalize_qk:
    q, k = unit(q), unit(k)
    scale_H = np.asarray(p['query']['scale'])
    assert (scale_H == 1.5).all()
    bias_scale_H = scale_H if compat_meliad else bias_scale_H
  table_HN = p['position']['table']
  for b, t, h in np.ndindex(B, T, H):
    logits, values = [], []
    for back in range(1, W + 1):
      bias = table_HN[h, positions.t5_bucket(np.array(back), 32, 128)]
      inside = t - back >= 0
      if inside or compat_meliad:  # There, zeros before the document are seen.
        content = q[b, t, h] @ k[b, t - back, h] if inside else 0
        logits.append(content * scale_H[h] + bias * bias_scale_H[h])
        values.append(v[b, t - back, h] if inside else np.zeros(K))
    y = softmax(np.array(logits)) @ np.array(values) if logits else 0
    np.testing.assert_allclose(
      found[b, t, h * K : (h + 1) * K], y, rtol=1e-4, atol=1e-5
    )


def test_reading_memory_has_its_own_queries_and_no_order():
  module, params, x = attention()
  memory = KV(draw(B, S, H, K), draw(B, S, H, K, seed=1), np.ones((B, S), bool))
  read = lambda m: module.apply(params, x, m, method='read_memory')
  q = unit(heads_of(params['params']['memory_query']['heads']['kernel'], x))
  logits = 1.5 * np.einsum('bthk,bshk->bhts', q, memory.k)
  y = np.einsum('bhts,bshk->bthk', softmax(logits), memory.v)
  np.testing.assert_allclose(
    read(memory), y.reshape(B, T, -1), rtol=1e-4, atol=1e-5
  )
  turned = jax.tree.map(lambda a: a[:, ::-1], memory)
  np.testing.assert_allclose(read(memory), read(turned), atol=1e-5)


def test_writing_joins_the_sources():
  module, params, x = attention()
  a, b = draw(B, T, H * K, seed=1), draw(B, T, H * K, seed=2)
  kernel = params['params']['output']['linear']['kernel']
  assert kernel.shape == (2, H * K, D)
  np.testing.assert_allclose(
    module.apply(params, x, a, b, method='write'),
    x + a @ kernel[0] + b @ kernel[1],
    rtol=1e-4,
    atol=1e-4,
  )


def test_without_order_every_key_is_visible():
  module = Attention(config(), in_order=False)
  x = draw(B, T, D)

  def read(m):
    return m.read_past(x, m.kv(x))

  y, params = module.init_with_output(jax.random.key(0), method=read)
  assert 'position' not in params['params']
  changed = x.copy()
  changed[:, -1] += 1
  keys = lambda z: module.apply(params, z, method='kv')
  first = lambda z: read_past(module, params, x, keys(z))[:, 0]
  assert np.abs(first(x) - first(changed)).max() > 1e-3


def test_dropout_of_probabilities_needs_rate_and_rng():
  x = draw(B, T, D)
  memory = KV(draw(B, S, H, K), draw(B, S, H, K), np.ones((B, S), bool))
  module = Attention(config(), has_memory=True, rate=0.5)
  init = lambda m: m.read_memory(x, memory)
  y, params = module.init_with_output(
    {'params': jax.random.key(0)}, method=init
  )
  apply = lambda **o: module.apply(params, x, memory, method='read_memory', **o)
  np.testing.assert_allclose(apply(), y, rtol=1e-6)
  assert (apply(rngs={'dropout': jax.random.key(1)}) != y).any()
  without = module.clone(rate=0.0)
  np.testing.assert_array_equal(
    without.apply(
      params,
      x,
      memory,
      method='read_memory',
      rngs={'dropout': jax.random.key(1)},
    ),
    y,
  )


def test_feed_forward():
  x, h = draw(B, T, D), draw(B, T, D, seed=1)
  module = FeedForward(F, 'float32', gates.Residual)
  y, params = module.init_with_output(jax.random.key(0), x, h)
  p = params['params']
  hidden = np.maximum(h @ p['hidden']['kernel'], 0)
  assert hidden.shape == (B, T, F)
  expected = x + hidden @ p['output']['linear']['kernel']
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_norm_is_by_root_mean_square():
  module, params, x = attention()
  rms = np.sqrt((x**2).mean(-1, keepdims=True))
  np.testing.assert_allclose(
    module.apply(params, jnp.asarray(x), method='enter'),
    1.5 * x / rms,
    rtol=1e-4,
  )
