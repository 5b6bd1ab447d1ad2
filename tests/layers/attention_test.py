"""Keys and values, and heads."""

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.kernels.reference import unit
from meliad_rec.layers.attention import Heads
from meliad_rec.layers.attention import KV

B, S, H, K, D = 3, 5, 2, 7, 11


def example():
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  return KV(draw(B, S, H, K), draw(B, S, H, K), rng.random((B, S)) < 0.7)


def test_append_and_last():
  kv = example()
  both = kv.append(kv.replace(k=kv.k + 1))
  assert both.mask.shape == (B, 2 * S)
  np.testing.assert_array_equal(both.k[:, :S], kv.k)
  np.testing.assert_array_equal(both.last(S).k, kv.k + 1)


def test_what_is_kept_is_not_raw():
  past, own = example(), example()
  both = past.append(own.replace(unnormalized=S))
  assert both.unnormalized == S
  np.testing.assert_array_equal(both.k, past.append(own).k)
  for length in (2 * S, S + 2, S, 3):
    kept = both.last(length)
    assert kept.unnormalized == 0
    plain = past.append(own.replace(k=unit(own.k))).last(length)
    np.testing.assert_allclose(kept.k, plain.k, rtol=1e-6)
    np.testing.assert_array_equal(kept.v, plain.v)


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
