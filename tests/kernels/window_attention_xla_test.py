"""The fast form against the definition: values, gradients, dropout."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.kernels import reference as ref
from meliad_rec.kernels import xla

B, W, H, K = 3, 8, 2, 5


def example(T, dtype=np.float32, W=W, with_keys=True):
  """q, k, v, mask, bias, and what is added to the keys."""
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
    draw(W, K).astype(np.float32) if with_keys else None,
  )


def attend(function, arguments, **options):
  *arguments, keys = arguments
  return function(*arguments, keys_WK=keys, **options)


def grad_of(function, arguments, **options):
  """(y, gradients of q, k, v, bias, keys), and what to call it with."""
  q, k, v, mask, bias, keys = arguments

  def loss(q, k, v, bias, keys):
    y = attend(function, (q, k, v, mask, bias, keys), **options)
    # Each output counts differently.
    return jnp.sum(jnp.sin(jnp.arange(y.size)) * y.ravel()), y

  grad = jax.value_and_grad(loss, (0, 1, 2, 3, 4), has_aux=True)
  return jax.jit(grad), (q, k, v, bias, keys)


def both(function, arguments, **options):
  """Values, and gradients."""
  grad, arguments = grad_of(function, arguments, **options)
  (_, y), grads = grad(*arguments)
  return y, *jax.tree.leaves(grads)


def exactly(arguments, **options):
  """The definition in float64: as both."""
  wide = lambda a: a.astype(np.float64) if a.dtype == np.float32 else a
  with jax.enable_x64(True):
    return both(ref.window_attention, jax.tree.map(wide, arguments), **options)


# One tile; several; a last one that is not full; tiles wider than the window;
# one query; a window of one key.
SHAPES = [(6, 8, W), (24, 4, W), (21, 4, W), (23, 11, W), (1, None, W)]
SHAPES += [(1, None, 1), (5, None, 1)]


@pytest.mark.parametrize('T, tile, W', SHAPES)
@pytest.mark.parametrize('include_self', [False, True])
@pytest.mark.parametrize('with_keys', [False, True])
def test_is_the_definition(T, tile, W, include_self, with_keys):
  arguments = example(T, W=W, with_keys=with_keys)
  found = both(
    xla.window_attention, arguments, include_self=include_self, tile=tile
  )
  expected = exactly(arguments, include_self=include_self)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(('T', 'tile'), [(1, None), (11, 4)])
def test_own_keys_that_are_raw(T, tile):
  arguments = example(T)
  found = both(xla.window_attention, arguments, tile=tile, normalize_own=True)
  expected = exactly(arguments, normalize_own=True)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize('T', [1, 6, 13])
@pytest.mark.parametrize('past', [0, 1, 5, W])
@pytest.mark.parametrize('include_self', [False, True])
def test_a_shorter_past_is_one_whose_first_keys_are_masked(
  T, past, include_self
):
  q, k, v, mask_BS, *by_distance = example(T)
  there = np.arange(W + T) >= W - past
  whole = q, k, v, mask_BS & there, *by_distance
  short = q, k[:, there], v[:, there], mask_BS[:, there], *by_distance
  expected = attend(ref.window_attention, whole, include_self=include_self)
  for function in (ref.window_attention, xla.window_attention):
    y = attend(function, short, include_self=include_self)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize('T', [1, 13])
def test_a_bias_of_never_hides_a_key(T):
  arguments = example(T)
  arguments[4][0, 2:] = ref.NEVER
  found = both(xla.window_attention, arguments, tile=4)
  expected = exactly(arguments)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize('T', [1, 13])
def test_query_without_keys_is_zero_with_finite_gradients(T):
  q, k, v, mask, bias, keys = example(T)
  arguments = q, k, v, np.zeros_like(mask), bias, keys
  for a in both(xla.window_attention, arguments, tile=4):
    assert not np.any(a)


def test_huge_logits_stay_finite():
  q, *others = example(13)
  for a in both(xla.window_attention, (q * 1e4, *others), tile=4):
    assert np.isfinite(a).all()


@pytest.mark.parametrize('with_keys', [False, True])
def test_bfloat16_in_and_out(with_keys):
  low = example(21, jnp.bfloat16, with_keys=with_keys)
  y, *grads = both(xla.window_attention, low)
  assert y.dtype == jnp.bfloat16
  q, k, v = (a.astype(np.float32) for a in low[:3])
  high, *expected = both(ref.window_attention, (q, k, v, *low[3:]))
  np.testing.assert_allclose(y.astype(np.float32), high, atol=0.04)
  for a, b in zip(grads, expected, strict=True):
    error = np.abs(a.astype(np.float32) - b).max()
    assert error < 0.02 * np.abs(b).max()


@pytest.mark.parametrize('with_keys', [False, True])
def test_nothing_of_all_queries_by_the_window_is_stored(with_keys):
  T, W = 256, 32
  arguments = example(T, W=W, with_keys=with_keys)
  grad, arguments = grad_of(xla.window_attention, arguments, tile=8)
  text = grad.lower(*arguments).as_text()
  shapes = [s.split('x') for s in re.findall(r'tensor<((?:\d+x)+)', text)]
  most = max(math.prod(int(n) for n in shape if n) for shape in shapes)
  assert most < B * H * T * W
  assert 'gather' not in text and 'scatter' not in text


@pytest.mark.parametrize('window, tile', [(7, 7), (16, 16), (64, 16), (66, 66)])
def test_default_tile(window, tile):
  assert xla.default_tile(window) == tile


@pytest.mark.parametrize('include_self', [False, True])
def test_band_holds_each_distance_at_its_place(include_self):
  Q, W = 3, 5
  bias_HW = np.arange(1.0, 1 + 2 * W, dtype=np.float32).reshape(2, W)
  tile_HQX = np.asarray(xla.band_tile(bias_HW, Q, include_self))
  assert tile_HQX.shape == (2, Q, W + Q)
  for h, q, x in np.ndindex(*tile_HQX.shape):
    back = W + q - x - (0 if include_self else 1)
    expected = bias_HW[h, back] if 0 <= back < W else np.float32(xla.NEVER)
    assert tile_HQX[h, q, x] == expected


def test_dropout_drops_its_share_and_keeps_the_mean():
  q, k, v, mask, bias, _ = example(2 * W)
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
  q, k, v, mask, bias, _ = (np.zeros_like(a) for a in example(2 * W))
  mask, v = np.ones_like(mask), np.ones_like(v)
  call = jax.jit(
    functools.partial(xla.window_attention, dropout_rate=0.5, tile=W)
  )
  y_BTH = call(q, k, v, mask, bias, dropout_rng=jax.random.key(0))[..., 0]
  np.testing.assert_allclose(y_BTH[0], y_BTH[1], atol=1e-6)
  np.testing.assert_allclose(y_BTH[:, :W], y_BTH[:, W:], atol=1e-6)
  assert y_BTH[0, 0, 0] != y_BTH[0, 1, 0]
