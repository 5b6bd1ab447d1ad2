"""Windowed attention in XLA against the definition, and dropout."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.kernels import reference as ref
from meliad_rec.kernels import xla
from meliad_rec.kernels.blocks import Dropout
from tests.attention_example import assert_close
from tests.attention_example import both
from tests.attention_example import exactly
from tests.attention_example import example
from tests.attention_example import grad_of
from tests.attention_example import with_raw_own

W, K = 8, 5


def inputs_of(T, W=W, P=None, scale=None, keys=True, **options):
  P = W if P is None else P
  return example(T, P, W, K=K, scale=scale, keys=keys, **options)


# One tile; several; a last one that is not full; tiles wider than the window;
# one query; a window of one key.
SHAPES = [(6, 8, W), (24, 4, W), (21, 4, W), (23, 11, W), (1, None, W)]
SHAPES += [(1, None, 1), (5, None, 1)]


@pytest.mark.parametrize('T, tile, W', SHAPES)
@pytest.mark.parametrize('include_self', [False, True])
@pytest.mark.parametrize('keys', [False, True])
def test_is_the_definition(T, tile, W, include_self, keys):
  inputs = inputs_of(T, W, keys=keys, include_self=include_self)
  found = both(xla.window_attention, inputs, tile=tile)
  assert_close(found, exactly(inputs), 3e-5)


@pytest.mark.parametrize(('T', 'tile'), [(1, None), (11, 4)])
def test_keys_and_queries_to_normalize(T, tile):
  inputs = with_raw_own(inputs_of(T, scale=3.0))
  found = both(xla.window_attention, inputs, tile=tile)
  assert_close(found, exactly(inputs), 3e-5)


@pytest.mark.parametrize('T', [1, 6, 13])
@pytest.mark.parametrize('past', [0, 1, 5, W])
@pytest.mark.parametrize('include_self', [False, True])
def test_a_shorter_past_is_one_whose_first_keys_are_masked(
  T, past, include_self
):
  inputs = inputs_of(T, include_self=include_self)
  there = np.arange(W + T) >= W - past
  expected = ref.window_attention(
    inputs.replace(mask_BS=inputs.mask_BS & there)
  )
  short = inputs.replace(
    k_BSHK=inputs.k_BSHK[:, there],
    v_BSHK=inputs.v_BSHK[:, there],
    mask_BS=inputs.mask_BS[:, there],
  )
  for function in (ref.window_attention, xla.window_attention):
    np.testing.assert_allclose(function(short), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize('T', [1, 13])
def test_query_without_keys_is_zero_with_finite_gradients(T):
  inputs = inputs_of(T)
  inputs = inputs.replace(mask_BS=jnp.zeros_like(inputs.mask_BS))
  for a in both(xla.window_attention, inputs, tile=4):
    assert not np.any(a)


def test_huge_logits_stay_finite():
  inputs = inputs_of(13)
  inputs = inputs.replace(q_BTHK=inputs.q_BTHK * 1e4)
  for a in both(xla.window_attention, inputs, tile=4):
    assert np.isfinite(a).all()


@pytest.mark.parametrize('keys', [False, True])
def test_bfloat16_in_and_out(keys):
  inputs = inputs_of(21, keys=keys, dtype='bfloat16')
  found = both(xla.window_attention, inputs)
  assert found[0].dtype == jnp.bfloat16
  assert_close(found, exactly(inputs), 0.02)


@pytest.mark.parametrize('keys', [False, True])
def test_nothing_of_all_queries_by_the_window_is_stored(keys):
  T, W = 256, 32
  inputs = inputs_of(T, W, keys=keys)
  grad, arrays = grad_of(xla.window_attention, inputs, tile=8)
  text = jax.jit(grad).lower(arrays).as_text()
  shapes = [s.split('x') for s in re.findall(r'tensor<((?:\d+x)+)', text)]
  most = max(math.prod(int(n) for n in shape if n) for shape in shapes)
  B, _, H, _ = inputs.q_BTHK.shape
  assert most < B * H * T * W
  assert 'gather' not in text and 'scatter' not in text


@pytest.mark.parametrize('window, tile', [(7, 7), (16, 16), (64, 16), (66, 66)])
def test_default_tile(window, tile):
  assert xla.default_tile(window) == tile


@pytest.mark.parametrize('include_self', [False, True])
def test_band_has_each_distance_at_its_place(include_self):
  Q, W = 3, 5
  bias_HW = np.arange(1.0, 1 + 2 * W, dtype=np.float32).reshape(2, W)
  tile_HQX = np.asarray(xla.band_tile(bias_HW, Q, include_self))
  assert tile_HQX.shape == (2, Q, W + Q)
  for h, q, x in np.ndindex(*tile_HQX.shape):
    back = W + q - x - (0 if include_self else 1)
    expected = bias_HW[h, back] if 0 <= back < W else np.float32(ref.NEVER)
    assert tile_HQX[h, q, x] == expected


def averaging_inputs():
  """Inputs with equal logits and values of 1: outputs sum what is kept."""
  inputs = jax.tree.map(jnp.zeros_like, inputs_of(2 * W, keys=False))
  return inputs.replace(
    mask_BS=jnp.ones_like(inputs.mask_BS), v_BSHK=jnp.ones_like(inputs.v_BSHK)
  )


def test_dropout_drops_its_share_and_keeps_the_mean():
  inputs = averaging_inputs()
  call = jax.jit(
    lambda rng: xla.window_attention(inputs, Dropout(rng, 0.4), tile=W)
  )
  y = np.stack([call(r) for r in jax.random.split(jax.random.key(0), 200)])
  np.testing.assert_allclose(y.mean(), 1, atol=0.02)
  assert y.std() > 0.1
  np.testing.assert_allclose(xla.window_attention(inputs), 1, atol=1e-5)


def test_dropout_is_one_mask_for_all_rows_and_tiles():
  dropout = Dropout(jax.random.key(0), 0.5)
  y_BTH = xla.window_attention(averaging_inputs(), dropout, tile=W)[..., 0]
  np.testing.assert_allclose(y_BTH[0], y_BTH[1], atol=1e-6)
  np.testing.assert_allclose(y_BTH[:, :W], y_BTH[:, W:], atol=1e-6)
  assert y_BTH[0, 0, 0] != y_BTH[0, 1, 0]
