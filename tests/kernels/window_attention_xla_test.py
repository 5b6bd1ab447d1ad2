"""The fast form against the definition: values, gradients, dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.kernels import window_attention_ref as ref
from meliad_rec.kernels import window_attention_xla as xla

B, W, H, K = 3, 8, 2, 5


def example(T, dtype=np.float32):
  rng = np.random.default_rng(T)
  draw = lambda *shape: rng.normal(size=shape).astype(dtype)
  S = W + T
  mask_BS = rng.random((B, S)) < 0.8
  mask_BS[1, : W + 3] = False  # The first queries of row 1 see no key.
  return (
    draw(B, T, H, K),
    draw(B, S, H, K),
    draw(B, S, H, K),
    mask_BS,
    draw(H, W).astype(np.float32),
  )


def both(function, arguments, **options):
  """Values, and gradients of q, k, v and bias."""
  q, k, v, mask, bias = arguments

  def loss(q, k, v, bias):
    y = function(q, k, v, mask, bias, **options)
    # Each output counts differently.
    return jnp.sum(jnp.sin(jnp.arange(y.size)) * y.ravel()), y

  grad = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))
  (_, y), grads = grad(q, k, v, bias)
  return y, *grads


# One tile; several; a last one that is not full; tiles wider than the window.
@pytest.mark.parametrize('T, tile', [(6, 8), (24, 4), (21, 4), (23, 11)])
@pytest.mark.parametrize('sees_self', [False, True])
def test_is_the_definition(T, tile, sees_self):
  arguments = example(T)
  found = both(xla.window_attention, arguments, sees_self=sees_self, tile=tile)
  expected = both(ref.window_attention, arguments, sees_self=sees_self)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_query_without_keys_is_zero_with_finite_gradients():
  q, k, v, mask, bias = example(13)
  arguments = q, k, v, np.zeros_like(mask), bias
  for a in both(xla.window_attention, arguments, tile=4):
    assert not np.any(a)


def test_huge_logits_stay_finite():
  q, k, v, mask, bias = example(13)
  arguments = q * 1e4, k, v, mask, bias
  for a in both(xla.window_attention, arguments, tile=4):
    assert np.isfinite(a).all()


def test_bfloat16_in_and_out():
  low = example(21, jnp.bfloat16)
  y = jax.jit(xla.window_attention)(*low)
  assert y.dtype == jnp.bfloat16
  q, k, v = (a.astype(np.float32) for a in low[:3])
  high = jax.jit(ref.window_attention)(q, k, v, *low[3:])
  np.testing.assert_allclose(y.astype(np.float32), high, atol=0.04)


@pytest.mark.parametrize('window, tile', [(7, 7), (16, 16), (64, 16), (66, 66)])
def test_default_tile(window, tile):
  assert xla.default_tile(window) == tile


@pytest.mark.parametrize('sees_self', [False, True])
def test_band_holds_each_distance_at_its_place(sees_self):
  Q, W = 3, 5
  bias_HW = np.arange(1.0, 1 + 2 * W, dtype=np.float32).reshape(2, W)
  tile_HQX = np.asarray(xla.band_tile(bias_HW, Q, sees_self))
  assert tile_HQX.shape == (2, Q, W + Q)
  for h, q, x in np.ndindex(*tile_HQX.shape):
    back = W + q - x - (0 if sees_self else 1)
    expected = bias_HW[h, back] if 0 <= back < W else np.float32(xla.NEVER)
    assert tile_HQX[h, q, x] == expected


def test_dropout_drops_its_share_and_keeps_the_mean():
  q, k, v, mask, bias = example(2 * W)
  mask, v = np.ones_like(mask), np.ones_like(v)
  call = jax.jit(
    functools.partial(xla.window_attention, dropout_rate=0.4, tile=W)
  )
  keys = jax.random.split(jax.random.key(0), 200)
  # Of values 1, what is kept of each query's attention.
  y = np.stack([call(q, k, v, mask, bias, dropout_rng=r) for r in keys])
  np.testing.assert_allclose(y.mean(), 1, atol=0.02)
  assert y.std() > 0.1
  np.testing.assert_allclose(call(q, k, v, mask, bias), 1, atol=1e-5)


def test_dropout_is_one_mask_for_all_rows_and_tiles():
  q, k, v, mask, bias = (np.zeros_like(a) for a in example(2 * W))
  mask, v = np.ones_like(mask), np.ones_like(v)
  call = jax.jit(
    functools.partial(xla.window_attention, dropout_rate=0.5, tile=W)
  )
  y_BTH = call(q, k, v, mask, bias, dropout_rng=jax.random.key(0))[..., 0]
  np.testing.assert_allclose(y_BTH[0], y_BTH[1], atol=1e-6)
  np.testing.assert_allclose(y_BTH[:, :W], y_BTH[:, W:], atol=1e-6)
  assert y_BTH[0, 0, 0] != y_BTH[0, 1, 0]
