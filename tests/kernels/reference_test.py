"""The definitions of attention against loops over queries and keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.kernels import reference as ref

B, T, W, S, H, K = 3, 7, 4, 5, 2, 6


def drawer():
  rng = np.random.default_rng(0)
  return rng, lambda *shape: rng.normal(size=shape).astype(np.float32)


def window_loop(inputs):
  y_BTHK = np.zeros(inputs.q_BTHK.shape)
  for b, t, h in np.ndindex(B, T, H):
    own = W + t  # The key of the query's own token.
    total = 0.0
    for back in range(W):
      key = own - back - (0 if inputs.include_self else 1)
      if not inputs.mask_BS[b, key]:
        continue
      k_K = inputs.k_BSHK[b, key, h]
      if inputs.keys_WK is not None:
        k_K = k_K + inputs.keys_WK[back]
      p = np.exp(inputs.q_BTHK[b, t, h] @ k_K + inputs.bias_HW[h, back])
      total += p
      y_BTHK[b, t, h] += p * inputs.v_BSHK[b, key, h]
    y_BTHK[b, t, h] /= total or 1
  return y_BTHK


def window_inputs(**options):
  rng, draw = drawer()
  q, k, v = draw(B, T, H, K), draw(B, W + T, H, K), draw(B, W + T, H, K)
  mask = rng.random((B, W + T)) < 0.7
  mask[1, : W + 2] = False  # The first queries of row 1 see nothing.
  bias, keys = draw(H, W), draw(W, K)
  return ref.AttentionInputs(q, k, v, mask, bias, keys_WK=keys, **options)


@pytest.mark.parametrize('include_self', [False, True])
@pytest.mark.parametrize('with_keys', [False, True])
def test_window_attention_is_the_loop(include_self, with_keys):
  inputs = window_inputs(include_self=include_self)
  if not with_keys:
    inputs = inputs.replace(keys_WK=None)
  found = jax.jit(ref.window_attention)(inputs)
  np.testing.assert_allclose(found, window_loop(inputs), rtol=1e-5, atol=1e-6)
  assert (found[1, 0] == 0).all()


def test_a_bias_of_never_hides_a_key():
  inputs = window_inputs()
  mask = np.arange(W + T) == np.array([[1], [W], [W + 1]])  # One key a row.
  inputs.bias_HW[0, 2:] = ref.MASKED
  inputs = inputs.replace(mask_BS=mask, keys_WK=None)
  found = jax.jit(ref.window_attention)(inputs)
  np.testing.assert_allclose(found, window_loop(inputs), rtol=1e-5, atol=1e-6)
  assert (found[1, 3, 0] == 0).all()  # Head 0 does not see what head 1 sees.
  assert (found[1, 3, 1] == inputs.v_BSHK[1, W, 1]).all()


def memory_inputs():
  """Inputs whose row 1 sees nothing."""
  rng, draw = drawer()
  mask_BS = rng.random((B, S)) < 0.7
  mask_BS[1] = False
  q, k, v = draw(B, T, H, K), draw(B, S, H, K), draw(B, S, H, K)
  return ref.MemoryInputs(q, k, v, mask_BS)


def memory_loop(inputs, keep_HTS):
  y_BTHK = np.zeros(inputs.q_BTHK.shape)
  for b, t, h in np.ndindex(B, T, H):
    weights = {
      s: np.exp(inputs.q_BTHK[b, t, h] @ inputs.k_BSHK[b, s, h])
      for s in range(S)
      if inputs.mask_BS[b, s]
    }
    for s, weight in weights.items():
      share = weight / sum(weights.values()) * keep_HTS[h, t, s]
      y_BTHK[b, t, h] += share * inputs.v_BSHK[b, s, h]
  return y_BTHK


def test_memory_attention_is_the_loop():
  inputs = memory_inputs()
  close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5)
  ones = np.ones((H, T, S))
  close(ref.memory_attention(inputs), memory_loop(inputs, ones))
  keep = np.random.default_rng(1).random((H, T, S)) * 2
  close(ref.memory_attention(inputs, keep), memory_loop(inputs, keep))


@pytest.mark.parametrize(
  ('attend', 'inputs'),
  [
    (ref.window_attention, window_inputs()),
    (ref.memory_attention, memory_inputs()),
  ],
)
def test_scaled_queries_shared_keys_and_own_keys(attend, inputs):
  attend = jax.jit(attend)

  def assert_alike(a, b):
    a, b = (attend(inputs.replace(**changes)) for changes in (a, b))
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

  scale_H = np.array([2.0, 3.0])
  scaled = ref.normalize_and_scale(inputs.q_BTHK, scale_H)
  assert_alike({'scale_H': scale_H}, {'q_BTHK': scaled})
  shared = {
    'k_BSHK': inputs.k_BSHK[:, :, :1],
    'v_BSHK': inputs.v_BSHK[:, :, :1],
  }
  assert_alike(shared, {k: np.repeat(a, H, 2) for k, a in shared.items()})
  if isinstance(inputs, ref.AttentionInputs):
    k_BSHK = inputs.k_BSHK.copy()
    k_BSHK[:, W:] /= np.linalg.norm(k_BSHK[:, W:], axis=-1, keepdims=True)
    assert_alike({'normalize_own': True}, {'k_BSHK': k_BSHK})


def test_without_slots_zeros_and_finite_gradients():
  inputs = memory_inputs()

  def loss(arrays):
    whole = arrays.replace(mask_BS=inputs.mask_BS)
    y_BTHK = ref.memory_attention(whole)
    return jnp.sum(y_BTHK**2), y_BTHK

  grad = jax.jit(jax.grad(loss, has_aux=True))
  grads, y_BTHK = grad(inputs.replace(mask_BS=None))
  assert not y_BTHK[1].any()
  for g in map(np.asarray, jax.tree.leaves(grads)):
    assert np.isfinite(g).all()
    assert g[0].any() and not g[1].any()
