"""Attention to a window and to memory against NumPy; window caches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.kernels.reference import l2_normalize
from meliad_rec.layers import layer
from meliad_rec.layers import positions
from meliad_rec.layers.attention import Heads
from meliad_rec.layers.attention import KV
from meliad_rec.layers.layer import Attention
from tests.architectures import config
from tests.architectures import D
from tests.architectures import H
from tests.architectures import K
from tests.architectures import W
from tests.cells import draw

B, T, S = 3, 11, 5
MEMORY = KV(draw(B, S, H, K), draw(B, S, H, K, seed=1), np.ones((B, S), bool))


def softmax(x):
  p = np.exp(x - x.max(-1, keepdims=True))
  return p / p.sum(-1, keepdims=True)


def attention(**changes):
  """Returns the module, parameters that are not 1, and x_BTD."""
  module = Attention(config(**changes), has_memory=True)
  x_BTD = draw(B, T, D)

  def all_of_it(m):
    n = m.pre_norm(x_BTD)
    past = m.config.empty_past(B).append(m.kv(n))
    heads = m.attend_window(n, past), m.attend_memory(n, m.kv(n))
    return m.project(x_BTD, *heads)

  params = jax.jit(lambda r: module.init(r, method=all_of_it))(
    jax.random.key(0)
  )['params']
  moved = lambda a: a * 1.5 if a.ndim == 1 else a
  return module, {'params': jax.tree.map(moved, params)}, x_BTD


@pytest.mark.parametrize(('memory', 'first'), [(None, 5.0), (2.0, 2.0)])
def test_scales_of_tokens_and_of_memory_begin_apart(memory, first):
  _, variables, _ = attention(qk_scale=5.0, memory_qk_scale=memory)
  for name, value in ('query', 5.0), ('memory_query', first):
    scale_H = variables['params'][name]['scale'] / 1.5
    np.testing.assert_allclose(scale_H, value)


def test_kernels_may_be_left_out(monkeypatch):
  implementations = []
  for name in 'window_attention', 'memory_attention':
    whole = getattr(layer, name)

    def record(inputs, dropout, implementation, whole=whole):
      implementations.append(implementation)
      return whole(inputs, dropout, implementation)

    monkeypatch.setattr(layer, name, record)
  attention()
  attention(attention='xla')
  assert implementations == ['auto', 'auto', 'xla', 'xla']


def unit(y):
  return y / np.linalg.norm(y, axis=-1, keepdims=True)


def heads_of(kernel, x):
  return (x @ kernel).reshape(*x.shape[:2], H, K)


def read_past(module, params, n_BTD, past):
  """Returns y_BTHK."""
  read = functools.partial(module.apply, method='attend_window')
  return np.reshape(jax.jit(read)(params, n_BTD, past), (B, -1, H, K))


@pytest.mark.parametrize(
  'changes',
  [
    {'include_self': True},
    {'compat_meliad': True},
    {'compat_meliad': True, 'normalize_qk': False},
    {'normalize_qk': False, 'position': positions.RelativeKeys},
    {'position': positions.RelativeKeys, 'include_self': True},
  ],
)
def test_reading_the_past(changes):
  module, params, x = attention(**changes)
  settings = module.config
  past = settings.empty_past(B).append(module.apply(params, x, method='kv'))
  found = read_past(module, params, x, past)
  p = params['params']
  q = heads_of(p['query']['heads']['kernel'], x)
  k = heads_of(p['key']['kernel'], x)
  v = heads_of(p['value']['kernel'], x)
  scale_H = np.full(H, K**-0.5)
  bias_scale_H = np.ones(H)
  if settings.normalize_qk:
    q, k = unit(q), unit(k)
    scale_H = np.asarray(p['query']['scale'])
    assert (scale_H == 1.5).all()
    bias_scale_H = scale_H if settings.compat_meliad else bias_scale_H
  table = p['position']['table']
  nearest = 0 if settings.include_self else 1
  for b, t, h in np.ndindex(B, T, H):
    logits, values = [], []
    for back in range(nearest, W + nearest):
      inside = t - back >= 0
      if not inside and not settings.compat_meliad:
        continue
      # In meliad, zeros before the document are seen.
      key = k[b, t - back, h] if inside else np.zeros(K)
      bias = 0
      if settings.position is positions.RelativeKeys:
        key = key + table[back - nearest]
      else:
        bias = table[h, positions.t5_bucket(np.array(back), 32, 128)]
      logits.append(q[b, t, h] @ key * scale_H[h] + bias * bias_scale_H[h])
      values.append(v[b, t - back, h] if inside else np.zeros(K))
    y = softmax(np.array(logits)) @ np.array(values) if logits else 0
    np.testing.assert_allclose(found[b, t, h], y, rtol=1e-4, atol=1e-5)


def test_a_span_hides_what_lies_beyond_it():
  R = 3
  span = functools.partial(positions.AdaptiveSpan, ramp=R)
  module, params, x = attention(span=span)
  x = x[:, :1]  # The last of its keys, which it does not see itself.
  k, v = draw(2, B, W + 1, H, K)
  past = KV(k, v, np.ones((B, W + 1), bool))
  ratio_H = np.array([0, 2 / W], np.float32)  # Spans of 0 and 2 keys.
  params['params']['span']['ratio'] = ratio_H
  y_BTHK = read_past(module, params, x, past)
  for back in range(W):
    other = v.copy()
    other[:, W - 1 - back] += 1
    moved_BTHK = read_past(module, params, x, past.replace(v=other))
    changed_H = np.abs(moved_BTHK - y_BTHK).max((0, 1, 3)) > 1e-4
    np.testing.assert_array_equal(changed_H, [back < R, back < R + 2])


def test_reading_memory_has_its_own_queries():
  module, params, x = attention()
  found = module.apply(params, x, MEMORY, method='attend_memory')
  q = unit(heads_of(params['params']['memory_query']['heads']['kernel'], x))
  logits = 1.5 * np.einsum('bthk,bshk->bhts', q, MEMORY.k)
  y = np.einsum('bhts,bshk->bthk', softmax(logits), MEMORY.v)
  expected = y.reshape(B, T, -1)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_without_positions_every_key_is_visible():
  module = Attention(config(), has_positions=False)
  x = draw(B, T, D)
  read = lambda m, x, z: m.attend_slots(*m.query(x), m.kv(z), 'state_to_state')
  params = module.init(jax.random.key(0), x, x, method=read)
  assert 'position' not in params['params']
  changed = x.copy()
  changed[:, -1] += 1
  first = lambda z: module.apply(params, x, z, method=read)[:, 0]
  assert np.abs(first(x) - first(changed)).max() > 1e-3


@pytest.mark.parametrize('locked', [False, True])
def test_dropout_of_inputs_or_of_probabilities_too(locked):
  """Locked dropout drops inputs only, and the same at all tokens.

  No dropout drops probabilities of memory.
  """
  module, params, x = attention(locked_dropout=locked)
  rates = dataclasses.replace(module.config, dropout=0.5)
  module = module.clone(rate=0.5, attention_rate=rates.attention_rate)
  rngs = {'dropout': jax.random.key(1)}
  enter = lambda x: module.apply(params, x, method='pre_norm', rngs=rngs)
  many, one = enter(x) == 0, enter(x[:, :1]) == 0
  assert (many == np.repeat(one, T, 1)).all() == locked
  assert 0.2 < one.mean() < 0.8
  past = module.config.empty_past(B).append(
    module.apply(params, x, method='kv')
  )
  for method, source in ('attend_memory', MEMORY), ('attend_window', past):
    apply = functools.partial(module.apply, method=method)
    plain = jax.jit(apply)(params, x, source)
    dropped = jax.jit(apply)(params, x, source, rngs=rngs)
    never = locked or method == 'attend_memory'
    assert (dropped == plain).all() == never


def test_caches_keep_normalized_keys():
  past, own = (
    KV(*draw(2, B, S, H, K, seed=seed), draw(B, S, seed=seed) < 0.5)
    for seed in (0, 1)
  )
  both = past.append(own.replace(unnormalized=S))
  assert both.unnormalized == S
  np.testing.assert_array_equal(both.k, np.concatenate([past.k, own.k], 1))
  np.testing.assert_array_equal(both.mask[:, S:], own.mask)
  plain = np.concatenate([past.k, l2_normalize(own.k)], 1)
  for length in (2 * S, S + 2, S, 3):
    kept = both.last(length)
    assert kept.unnormalized == 0
    np.testing.assert_allclose(kept.k, plain[:, -length:], rtol=1e-6)
    np.testing.assert_array_equal(kept.v, both.v[:, -length:])


def test_heads_of_zeros_have_finite_gradients():
  module = Heads(H, K, True, 'float32')
  x = np.zeros((B, S, D), np.float32)
  params = module.init(jax.random.key(0), x)
  g = jax.jit(jax.grad(lambda x: jnp.sum(module.apply(params, x))))(x)
  assert np.isfinite(g).all()
