"""The definition against loops over queries and keys in float64."""

import numpy as np
import pytest

from meliad_rec.kernels.window_attention_ref import window_attention

B, T, W, H, K = 3, 7, 4, 2, 5


def slow(q_BTHK, k_BSHK, v_BSHK, mask_BS, bias_HW, sees_self):
  y_BTHK = np.zeros(q_BTHK.shape)
  for b, t, h in np.ndindex(B, T, H):
    own = W + t  # The key of the query's own token.
    total = 0.0
    for back in range(W):
      key = own - back - (0 if sees_self else 1)
      if not mask_BS[b, key]:
        continue
      p = np.exp(q_BTHK[b, t, h] @ k_BSHK[b, key, h] + bias_HW[h, back])
      total += p
      y_BTHK[b, t, h] += p * v_BSHK[b, key, h]
    y_BTHK[b, t, h] /= total or 1
  return y_BTHK


@pytest.mark.parametrize('sees_self', [False, True])
def test_is_the_loop(sees_self):
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  q, k, v = draw(B, T, H, K), draw(B, W + T, H, K), draw(B, W + T, H, K)
  mask = rng.random((B, W + T)) < 0.7
  mask[1, : W + 2] = False  # The first queries of row 1 see nothing.
  bias = draw(H, W)
  expected = slow(q, k, v, mask, bias, sees_self)
  found = window_attention(q, k, v, mask, bias, sees_self=sees_self)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  assert (found[1, 0] == 0).all()
