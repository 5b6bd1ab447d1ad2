"""Attention and MLP against NumPy, and what compat_meliad changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.kernels.reference import l2_normalize
from meliad_rec.layers import activations
from meliad_rec.layers import gates
from meliad_rec.layers import layer
from meliad_rec.layers import norms
from meliad_rec.layers import positions
from meliad_rec.layers.attention import Heads
from meliad_rec.layers.attention import KV
from meliad_rec.layers.layer import Attention
from meliad_rec.layers.layer import FeedForward
from meliad_rec.layers.positions import AdaptiveSpan
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


def test_kernels_may_be_left_out(monkeypatch):
  forms = []
  for name in 'window_attention', 'memory_attention':
    whole = getattr(layer, name)

    def record(inputs, dropout, form, whole=whole):
      forms.append(form)
      return whole(inputs, dropout, form)

    monkeypatch.setattr(layer, name, record)
  attention()
  attention(attention='xla')
  assert forms == ['auto', 'auto', 'xla', 'xla']
  with pytest.raises(ValueError, match='LayerConfig.attention'):
    config(attention='fast')


def unit(y):
  return y / np.linalg.norm(y, axis=-1, keepdims=True)


def heads_of(kernel, x):
  return (x @ kernel).reshape(*x.shape[:2], H, K)


def read_past(module, params, n_BTD, past):
  return np.asarray(module.apply(params, n_BTD, past, method='attend_window'))


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


@pytest.mark.parametrize('include_self', [False, True])
def test_relative_keys_are_added_to_the_keys(include_self):
  module, params, x = attention(
    position=positions.RelativeKeys,
    include_self=include_self,
    normalize_qk=False,
  )
  past = module.config.empty_past(B).append(
    module.apply(params, x, method='kv')
  )
  found = read_past(module, params, x, past)
  p = params['params']
  q = heads_of(p['query']['heads']['kernel'], x) * K**-0.5
  k = heads_of(p['key']['kernel'], x)
  v = heads_of(p['value']['kernel'], x)
  table_WK = p['position']['table']
  assert table_WK.shape == (W, K)
  nearest = 0 if include_self else 1
  for b, t, h in np.ndindex(B, T, H):
    steps_back = range(nearest, min(W + nearest, t + 1))
    keys = [k[b, t - s, h] + table_WK[s - nearest] for s in steps_back]
    values = [v[b, t - s, h] for s in steps_back]
    y = softmax(np.array(keys) @ q[b, t, h]) @ np.array(values) if keys else 0
    np.testing.assert_allclose(
      found[b, t, h * K : (h + 1) * K], y, rtol=1e-4, atol=1e-5
    )


def test_a_span_hides_what_lies_beyond_it():
  R = 3
  module, params, x = attention(span=functools.partial(AdaptiveSpan, ramp=R))
  x = x[:, :1]  # The last of its keys, which it does not see itself.
  past = KV(
    draw(B, W + 1, H, K), draw(B, W + 1, H, K), np.ones((B, W + 1), bool)
  )
  ratio_H = np.array([0, 2 / W], np.float32)  # Spans of 0 and 2 keys.
  params['params']['span']['ratio'] = ratio_H
  read = lambda v: read_past(module, params, x, past.replace(v=v))
  y_BHK = read(past.v).reshape(B, H, K)
  for back in range(W):
    v = past.v.copy()
    v[:, W - 1 - back] += 1
    changed = np.abs(read(v).reshape(B, H, K) - y_BHK).max((0, 2)) > 1e-4
    np.testing.assert_array_equal(changed, [back < R, back < R + 2])


def test_reading_memory_has_its_own_queries_and_no_order():
  module, params, x = attention()
  memory = KV(draw(B, S, H, K), draw(B, S, H, K, seed=1), np.ones((B, S), bool))
  read = lambda m: module.apply(params, x, m, method='attend_memory')
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
    module.apply(params, x, a, b, method='project'),
    x + a @ kernel[0] + b @ kernel[1],
    rtol=1e-4,
    atol=1e-4,
  )


def test_without_order_every_key_is_visible():
  module = Attention(config(), in_order=False)
  x = draw(B, T, D)

  def read(m):
    return m.attend_window(x, m.kv(x))

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
  init = lambda m: m.attend_memory(x, memory)
  y, params = module.init_with_output(
    {'params': jax.random.key(0)}, method=init
  )
  apply = lambda **o: module.apply(
    params, x, memory, method='attend_memory', **o
  )
  np.testing.assert_allclose(apply(), y, rtol=1e-6)
  assert (apply(rngs={'dropout': jax.random.key(1)}) != y).any()
  without = module.clone(rate=0.0)
  np.testing.assert_array_equal(
    without.apply(
      params,
      x,
      memory,
      method='attend_memory',
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


def test_feed_forward_of_another_kind():
  x, h = draw(B, T, D), draw(B, T, D, seed=1)
  join = functools.partial(gates.Residual, use_bias=True)
  module = FeedForward(F, 'float32', join, activations.gelu, use_bias=True)
  params = module.init(jax.random.key(0), x, h)['params']
  hidden, output = params['hidden'], params['output']['linear']
  hidden['bias'], output['bias'] = draw(F, seed=2), draw(D, seed=3)
  units = jax.nn.gelu(h @ hidden['kernel'] + hidden['bias'], approximate=False)
  np.testing.assert_allclose(
    module.apply({'params': params}, x, h),
    x + units @ output['kernel'] + output['bias'],
    rtol=1e-4,
    atol=1e-4,
  )


def test_locked_dropout_is_of_inputs_and_not_of_probabilities():
  module, params, x = attention(locked_dropout=True)
  module = module.clone(rate=0.5)
  rngs = {'dropout': jax.random.key(1)}
  enter = lambda x: module.apply(params, x, method='pre_norm', rngs=rngs)
  many, one = enter(x) == 0, enter(x[:, :1]) == 0
  np.testing.assert_array_equal(many, np.repeat(one, T, 1))
  assert 0.2 < one.mean() < 0.8
  memory = KV(draw(B, S, H, K), draw(B, S, H, K), np.ones((B, S), bool))
  past = module.config.empty_past(B).append(
    module.apply(params, x, method='kv')
  )
  for method, source in ('attend_memory', memory), ('attend_window', past):
    apply = lambda **o: module.apply(params, x, source, method=method, **o)
    np.testing.assert_array_equal(apply(rngs=rngs), apply())


def test_the_norm_is_that_of_the_config():
  module, params, x = attention(norm=norms.LayerNorm)
  assert params['params']['norm'].keys() == {'scale', 'bias'}
  np.testing.assert_allclose(
    module.apply(params, x, method='pre_norm').mean(-1), 0, atol=1e-5
  )


KV_B, KV_S, KV_H, KV_K, KV_D = 3, 5, 2, 7, 11


def example():
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  return KV(
    draw(KV_B, KV_S, KV_H, KV_K),
    draw(KV_B, KV_S, KV_H, KV_K),
    rng.random((KV_B, KV_S)) < 0.7,
  )


def test_append_and_last():
  kv = example()
  both = kv.append(kv.replace(k=kv.k + 1))
  assert both.mask.shape == (KV_B, 2 * KV_S)
  np.testing.assert_array_equal(both.k[:, :KV_S], kv.k)
  np.testing.assert_array_equal(both.last(KV_S).k, kv.k + 1)


def test_what_is_kept_is_not_raw():
  past, own = example(), example()
  both = past.append(own.replace(unnormalized=KV_S))
  assert both.unnormalized == KV_S
  np.testing.assert_array_equal(both.k, past.append(own).k)
  for length in (2 * KV_S, KV_S + 2, KV_S, 3):
    kept = both.last(length)
    assert kept.unnormalized == 0
    plain = past.append(own.replace(k=l2_normalize(own.k))).last(length)
    np.testing.assert_allclose(kept.k, plain.k, rtol=1e-6)
    np.testing.assert_array_equal(kept.v, plain.v)


def test_empty_is_masked_unless_it_shall_be_seen():
  hidden = KV.empty(KV_B, KV_S, KV_H, KV_K, 'bfloat16')
  assert not hidden.mask.any()
  assert hidden.k.shape == hidden.v.shape == (KV_B, KV_S, KV_H, KV_K)
  assert hidden.v.dtype == jnp.bfloat16
  assert KV.empty(KV_B, KV_S, KV_H, KV_K, 'float32', visible=True).mask.all()


def test_heads_are_unit_vectors_of_a_linear_map():
  x = (
    np.random.default_rng(0).normal(size=(KV_B, KV_S, KV_D)).astype(np.float32)
  )
  module = Heads(KV_H, KV_K, True, 'float32')
  params = module.init(jax.random.key(0), x)
  y = module.apply(params, x)
  plain = np.einsum('bsd,df->bsf', x, params['params']['kernel'])
  plain = plain.reshape(KV_B, KV_S, KV_H, KV_K)
  expected = plain / np.linalg.norm(plain, axis=-1, keepdims=True)
  np.testing.assert_allclose(y, expected, atol=1e-5)
  unnormalised = Heads(KV_H, KV_K, False, 'float32').apply(params, x)
  np.testing.assert_allclose(unnormalised, plain, atol=1e-5)


def test_heads_of_zeros_have_finite_gradients():
  module = Heads(KV_H, KV_K, True, 'float32')
  x = np.zeros((KV_B, KV_S, KV_D), np.float32)
  params = module.init(jax.random.key(0), x)
  g = jax.jit(jax.grad(lambda x: jnp.sum(module.apply(params, x))))(x)
  assert np.isfinite(g).all()
