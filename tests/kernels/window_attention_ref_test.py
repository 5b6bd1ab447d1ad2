"""The definition against loops over queries and keys in float64."""

import numpy as np
import pytest

from meliad_rec.kernels.reference import NEVER
from meliad_rec.kernels.reference import window_attention

B, T, W, H, K = 3, 7, 4, 2, 5


def slow(q_BTHK, k_BSHK, v_BSHK, mask_BS, bias_HW, keys_WK, include_self):
  y_BTHK = np.zeros(q_BTHK.shape)
  for b, t, h in np.ndindex(B, T, H):
    own = W + t  # The key of the query's own token.
    total = 0.0
    for back in range(W):
      key = own - back - (0 if include_self else 1)
      if not mask_BS[b, key]:
        continue
      k_K = k_BSHK[b, key, h] + keys_WK[back]
      p = np.exp(q_BTHK[b, t, h] @ k_K + bias_HW[h, back])
      total += p
      y_BTHK[b, t, h] += p * v_BSHK[b, key, h]
    y_BTHK[b, t, h] /= total or 1
  return y_BTHK


@pytest.mark.parametrize('include_self', [False, True])
@pytest.mark.parametrize('with_keys', [False, True])
def test_is_the_loop(include_self, with_keys):
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  q, k, v = draw(B, T, H, K), draw(B, W + T, H, K), draw(B, W + T, H, K)
  mask = rng.random((B, W + T)) < 0.7
  mask[1, : W + 2] = False  # The first queries of row 1 see nothing.
  bias, keys = draw(H, W), draw(W, K)
  expected = slow(q, k, v, mask, bias, keys * with_keys, include_self)
  found = window_attention(
    *(q, k, v, mask, bias),
    keys_WK=keys if with_keys else None,
    include_self=include_self,
  )
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  assert (found[1, 0] == 0).all()


def test_a_bias_of_never_hides_a_key():
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  q, k, v = draw(B, T, H, K), draw(B, W + T, H, K), draw(B, W + T, H, K)
  mask = np.arange(W + T) == np.array([[1], [W], [W + 1]])  # One key a row.
  bias = draw(H, W)
  bias[0, 2:] = NEVER
  expected = slow(q, k, v, mask, bias, np.zeros((W, K)), False)
  found = window_attention(q, k, v, mask, bias)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  assert (found[1, 3, 0] == 0).all()  # Head 0 does not see what head 1 sees.
  assert (found[1, 3, 1] == v[1, W, 1]).all()
