"""Keys and values, heads, and attention over slots against loops."""

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.attention import attend
from meliad_rec.attention import Heads
from meliad_rec.attention import KV

B, T, S, H, K, D = 3, 4, 5, 2, 7, 11


def example():
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  mask_BS = rng.random((B, S)) < 0.7
  mask_BS[1] = False
  return draw(B, T, H, K), KV(draw(B, S, H, K), draw(B, S, H, K), mask_BS)


def slow(q_BTHK, kv, keep_HTS):
  y_BTHK = np.zeros(q_BTHK.shape)
  for b, t, h in np.ndindex(B, T, H):
    weights = {
      s: np.exp(q_BTHK[b, t, h] @ kv.k[b, s, h])
      for s in range(S)
      if kv.mask[b, s]
    }
    for s, weight in weights.items():
      share = weight / sum(weights.values()) * keep_HTS[h, t, s]
      y_BTHK[b, t, h] += share * kv.v[b, s, h]
  return y_BTHK


def test_attend_is_the_loop():
  q, kv = example()
  ones = np.ones((H, T, S))
  np.testing.assert_allclose(attend(q, kv), slow(q, kv, ones), atol=1e-5)
  keep = np.random.default_rng(1).random((H, T, S)) * 2
  np.testing.assert_allclose(attend(q, kv, keep), slow(q, kv, keep), atol=1e-5)


def test_heads_may_share_keys():
  q, kv = example()
  shared = jax.tree.map(lambda a: a[:, :, :1], (kv.k, kv.v))
  each = (np.repeat(a, H, 2) for a in shared)
  np.testing.assert_array_equal(
    attend(q, KV(*shared, kv.mask)), attend(q, KV(*each, kv.mask))
  )


def test_without_slots_zeros_and_finite_gradients():
  q, kv = example()

  def loss(q, k, v):
    y_BTHK = attend(q, KV(k, v, kv.mask))
    return jnp.sum(y_BTHK**2), y_BTHK

  grad = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
  grads, y_BTHK = grad(q, kv.k, kv.v)
  assert not y_BTHK[1].any()
  for g in map(np.asarray, grads):
    assert np.isfinite(g).all()
    assert g[0].any() and not g[1].any()


def test_append_and_last():
  _, kv = example()
  both = kv.append(kv.replace(k=kv.k + 1))
  assert both.mask.shape == (B, 2 * S)
  np.testing.assert_array_equal(both.k[:, :S], kv.k)
  np.testing.assert_array_equal(both.last(S).k, kv.k + 1)


def test_empty_is_masked_unless_it_shall_be_seen():
  hidden = KV.empty(B, S, H, K, 'bfloat16')
  assert not hidden.mask.any()
  assert hidden.k.shape == hidden.v.shape == (B, S, H, K)
  assert hidden.v.dtype == jnp.bfloat16
  assert KV.empty(B, S, H, K, 'float32', visible=True).mask.all()


def test_heads_are_unit_vectors_of_a_linear_map():
  x = np.random.default_rng(0).normal(size=(B, S, D)).astype(np.float32)
  module = Heads(H, K, True, 'float32')
  params = module.init(jax.random.key(0), x)
  y = module.apply(params, x)
  plain = np.einsum('bsd,df->bsf', x, params['params']['kernel'])
  plain = plain.reshape(B, S, H, K)
  expected = plain / np.linalg.norm(plain, axis=-1, keepdims=True)
  np.testing.assert_allclose(y, expected, atol=1e-5)
  unnormalised = Heads(H, K, False, 'float32').apply(params, x)
  np.testing.assert_allclose(unnormalised, plain, atol=1e-5)


def test_heads_of_zeros_have_finite_gradients():
  module = Heads(H, K, True, 'float32')
  x = np.zeros((B, S, D), np.float32)
  params = module.init(jax.random.key(0), x)
  g = jax.jit(jax.grad(lambda x: jnp.sum(module.apply(params, x))))(x)
  assert np.isfinite(g).all()
