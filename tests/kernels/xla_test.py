"""Windowed attention in XLA against the definition, and dropout."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.kernels import blocks
from meliad_rec.kernels import reference as ref
from meliad_rec.kernels import xla
from meliad_rec.kernels.blocks import Dropout
from tests import attention_example as examples

W, K = 8, 5


def inputs_of(T, W=W, P=None, scale=None, keys=True, **options):
  P = W if P is None else P
  return examples.example(T, P, W, K=K, scale=scale, keys=keys, **options)


# One tile; several; a last one that is not full; tiles wider than the window;
# one query; a window of one key. Each form of keys and queries at every other.
SHAPES = [(6, 8, W), (24, 4, W), (21, 4, W), (23, 11, W), (1, None, W)]
SHAPES += [(1, None, 1), (5, None, 1)]
FORMS = [(False, False), (True, True)], [(False, True), (True, False)]


@pytest.mark.parametrize(
  ('T', 'tile', 'W', 'include_self', 'keys'),
  [(*shape, *form) for i, shape in enumerate(SHAPES) for form in FORMS[i % 2]],
)
def test_is_the_definition(T, tile, W, include_self, keys):
  inputs = inputs_of(T, W, keys=keys, include_self=include_self)
  attend = functools.partial(examples.window_by_xla, tile=tile)
  examples.assert_exact(attend, inputs, 3e-5)


@pytest.mark.parametrize(('T', 'tile'), [(1, None), (11, 4)])
def test_keys_and_queries_to_normalize(T, tile):
  inputs = examples.with_raw_own(inputs_of(T, scale=3.0))
  attend = functools.partial(examples.window_by_xla, tile=tile)
  examples.assert_exact(attend, inputs, 3e-5)


@pytest.mark.parametrize(
  ('T', 'past', 'include_self'),
  [
    *((1, 0, False), (1, 0, True), (1, 1, True), (1, 5, False)),
    *((6, 0, True), (6, 5, False), (13, 1, False), (13, 5, True)),
  ],
)
def test_a_shorter_past_is_one_whose_first_keys_are_masked(
  T, past, include_self
):
  inputs = inputs_of(T, include_self=include_self)
  there = np.arange(W + T) >= W - past
  masked = inputs.replace(mask_BS=inputs.mask_BS & there)
  expected = jax.jit(ref.window_attention)(masked)
  short = inputs.replace(
    k_BSHK=inputs.k_BSHK[:, there],
    v_BSHK=inputs.v_BSHK[:, there],
    mask_BS=inputs.mask_BS[:, there],
  )
  for function in (ref.window_attention, examples.window_by_xla):
    found = jax.jit(function)(short)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize('T', [1, 13])
def test_huge_logits_are_finite_and_queries_without_keys_zero(T):
  inputs = inputs_of(T)
  inputs = inputs.replace(q_BTHK=inputs.q_BTHK * 1e4)
  run = jax.jit(
    lambda mask_BS: examples.both(
      examples.window_by_xla, inputs.replace(mask_BS=mask_BS), tile=4
    )
  )
  assert all(np.isfinite(a).all() for a in run(inputs.mask_BS))
  assert not any(np.any(a) for a in run(jnp.zeros_like(inputs.mask_BS)))


def test_bfloat16_in_and_out():
  inputs = inputs_of(21, dtype='bfloat16')
  found = examples.both(examples.window_by_xla, inputs)
  assert found[0].dtype == jnp.bfloat16
  examples.assert_close(found, examples.exactly(inputs), 0.02)


@pytest.mark.parametrize('keys', [False, True])
def test_nothing_of_all_queries_by_the_window_is_stored(keys):
  T, W = 256, 32
  inputs = inputs_of(T, W, keys=keys)
  grad, arrays = examples.grad_of(examples.window_by_xla, inputs, tile=8)
  text = jax.jit(grad).lower(arrays).as_text()
  shapes = [s.split('x') for s in re.findall(r'tensor<((?:\d+x)+)', text)]
  most = max(math.prod(int(n) for n in shape if n) for shape in shapes)
  B, _, H, _ = inputs.q_BTHK.shape
  assert most < B * H * T * W
  assert 'gather' not in text and 'scatter' not in text


@pytest.mark.parametrize('window, tile', [(7, 7), (16, 16), (64, 16), (66, 66)])
def test_default_tile(window, tile):
  assert xla.default_tile(window) == tile


@pytest.mark.parametrize('T, P', [(2 * W, W), (1, W), (5, 3)])
def test_dropout_by_position_is_that_of_the_definition(T, P):
  """A query has the same mask whichever queries are processed with it."""
  inputs, rng = inputs_of(T, P=P, scale=3.0), jax.random.key(0)
  keep = blocks.keep_by_position(rng, 0.4, 0, 20 + T, (2, W))
  all_THW = keep[..., ::-1]  # Nearest key first.
  assert (all_THW[20] != all_THW[19]).any()

  def slow(inputs):
    p_BTHW = ref.window_weights(inputs) * all_THW[20:]
    key_TW = P + np.arange(T)[:, None] - 1 - np.arange(W)
    v_BTWHK = inputs.v_BSHK[:, np.maximum(key_TW, 0)]
    return jnp.einsum('bthw,btwhk->bthk', p_BTHW, v_BTWHK)

  found = examples.both(
    examples.window_by_xla, inputs, Dropout(rng, 0.4, 20), tile=7
  )
  examples.assert_close(found, examples.both(slow, inputs), 1e-5)


def test_dropout_is_one_mask_for_all_rows_and_tiles_and_keeps_the_mean():
  """With equal logits and values of 1, an output is the sum of what is kept."""
  inputs = jax.tree.map(jnp.zeros_like, inputs_of(2 * W, keys=False))
  inputs = inputs.replace(
    mask_BS=jnp.ones_like(inputs.mask_BS), v_BSHK=jnp.ones_like(inputs.v_BSHK)
  )
  call = jax.jit(
    lambda rng: examples.window_by_xla(inputs, Dropout(rng, 0.4), tile=W)
  )
  y = np.stack([call(r) for r in jax.random.split(jax.random.key(0), 200)])
  np.testing.assert_allclose(y.mean(), 1, atol=0.02)
  assert y.std() > 0.1
  y_BTH = y[0, ..., 0]
  np.testing.assert_allclose(y_BTH[0], y_BTH[1], atol=1e-6)
  np.testing.assert_allclose(y_BTH[:, :W], y_BTH[:, W:], atol=1e-6)
  assert y_BTH[0, 0, 0] != y_BTH[0, 1, 0]
