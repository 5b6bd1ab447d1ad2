"""Attention to memory slots against loops."""

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.kernels.reference import memory_attention
from meliad_rec.kernels.reference import scaled_unit

B, T, S, H, K = 3, 4, 5, 2, 7


def example():
  """Queries, keys, values and mask; row 1 sees nothing."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  mask_BS = rng.random((B, S)) < 0.7
  mask_BS[1] = False
  return draw(B, T, H, K), draw(B, S, H, K), draw(B, S, H, K), mask_BS


def slow(q_BTHK, k_BSHK, v_BSHK, mask_BS, keep_HTS):
  y_BTHK = np.zeros(q_BTHK.shape)
  for b, t, h in np.ndindex(B, T, H):
    weights = {
      s: np.exp(q_BTHK[b, t, h] @ k_BSHK[b, s, h])
      for s in range(S)
      if mask_BS[b, s]
    }
    for s, weight in weights.items():
      share = weight / sum(weights.values()) * keep_HTS[h, t, s]
      y_BTHK[b, t, h] += share * v_BSHK[b, s, h]
  return y_BTHK


def test_is_the_loop():
  given = example()
  close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5)
  close(memory_attention(*given), slow(*given, np.ones((H, T, S))))
  keep = np.random.default_rng(1).random((H, T, S)) * 2
  close(memory_attention(*given, keep_HTS=keep), slow(*given, keep))


def test_queries_may_be_brought_to_unit_length():
  q, *slots = example()
  scale_H = np.array([2.0, 3.0])
  np.testing.assert_array_equal(
    memory_attention(q, *slots, scale_H=scale_H),
    memory_attention(scaled_unit(q, scale_H), *slots),
  )


def test_heads_may_share_keys():
  q, k, v, mask = example()
  shared = k[:, :, :1], v[:, :, :1]
  each = (np.repeat(a, H, 2) for a in shared)
  np.testing.assert_array_equal(
    memory_attention(q, *shared, mask), memory_attention(q, *each, mask)
  )


def test_without_slots_zeros_and_finite_gradients():
  q, k, v, mask = example()

  def loss(q, k, v):
    y_BTHK = memory_attention(q, k, v, mask)
    return jnp.sum(y_BTHK**2), y_BTHK

  grad = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
  grads, y_BTHK = grad(q, k, v)
  assert not y_BTHK[1].any()
  for g in map(np.asarray, grads):
    assert np.isfinite(g).all()
    assert g[0].any() and not g[1].any()
