"""Encoders over documents or blocks: what tokens see."""

import functools

import jax
import numpy as np
import pytest

from meliad_rec.archs.transformer import Encoder
from meliad_rec.layers.encoder_layer import EncoderLayer
from meliad_rec.layers.positions import sinusoids
from tests import cells
from tests.architectures import D
from tests.architectures import encoder_config
from tests.architectures import S
from tests.architectures import T
from tests.architectures import transformer
from tests.architectures import W
from tests.cells import assert_close

B = 3


def example():
  """Row 1 ends in its second block; row 2 is empty."""
  return cells.example(lengths=[T, W + 2, 0])


def encode(causal, window=None, **options):
  return Encoder(transformer(causal=causal), window, **options)


@functools.cache
def parameters():
  return cells.parameters(encode(True))


def test_sinusoids_are_added_to_the_input():
  x_BTD = cells.example(lengths=[T]).x
  mask_BT = np.ones(x_BTD.shape[:2], bool)
  plain = transformer(causal=False)
  params = jax.jit(plain.init)(jax.random.key(0), x_BTD, mask_BT)
  moved = jax.jit(plain.clone(sinusoids=True).apply)
  found = moved(params, x_BTD, mask_BT)
  x_BTD = x_BTD + sinusoids(T, D)
  assert_close(found, jax.jit(plain.apply)(params, x_BTD, mask_BT))


@pytest.mark.slow
def test_a_layer_that_is_dropped_is_as_if_it_were_not_there():
  """It has gradients of exactly 0; evaluation drops no layer."""
  x_BTD, mask_BT = cells.example().x, np.ones((B, T), bool)
  plain = transformer(4, causal=False)
  params = jax.jit(plain.init)(jax.random.key(0), x_BTD, mask_BT)['params']
  wet = plain.clone(layer_drop=0.5)

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def gradients(params, key):
    rngs = {'dropout': key}
    y_BTD = wet.apply({'params': params}, x_BTD, mask_BT, rngs=rngs)
    return (y_BTD * np.sin(np.arange(D))).sum(), y_BTD

  numbers = set()
  for seed in range(6):
    grads, y_BTD = gradients(params, jax.random.key(seed))
    kept = [
      name
      for name, layer in grads.items()
      if any(np.any(leaf) for leaf in jax.tree.leaves(layer))
    ]
    numbers.add(len(kept))
    expected_BTD = x_BTD
    if kept:
      fewer = {f'layers_{i}': params[name] for i, name in enumerate(kept)}
      short = jax.jit(plain.clone(count=len(kept)).apply)
      expected_BTD = short({'params': fewer}, x_BTD, mask_BT)
    assert_close(y_BTD, expected_BTD)
  assert len(numbers) > 1
  whole, dry = (
    jax.jit(each.apply)({'params': params}, x_BTD, mask_BT)
    for each in (plain, wet)
  )
  np.testing.assert_array_equal(whole, dry)


@pytest.mark.parametrize('causal, window', [(True, None), (False, W)])
def test_what_a_token_changes(causal, window):
  """A token sees its document or block, or only earlier tokens of it."""
  cell, block, at = encode(causal, window), cells.example(lengths=[T]), W + 2
  sign_T1 = np.where(np.arange(T) == at, -1, 1)[:, None]
  other = block.replace(x=block.x * np.float32(sign_T1))
  (state, a), (_, b) = (
    cells.apply(cell, parameters(), each) for each in (block, other)
  )
  expected_T = np.arange(T) >= at if causal else np.ones(T, bool)
  if window:
    expected_T &= np.arange(T) // window == at // window
  np.testing.assert_array_equal(np.abs(a - b)[0].max(-1) > 1e-6, expected_T)
  assert cell.causal == causal
  assert state == () and cell.block_length == window
  assert cell.needs_whole_document == cell.takes_segments == (window is None)


def test_padding_is_invisible():
  """Neither its values nor its amount matter."""
  block, cell = example(), encode(False)
  _, y_BTD = cells.apply(cell, parameters(), block)
  junk = block.replace(x=block.x + 3 * ~block.mask[..., None])
  _, other_BTD = cells.apply(cell, parameters(), junk)
  assert_close(y_BTD[block.mask], other_BTD[block.mask])
  short = jax.tree.map(lambda a: a[1:2, : W + 2], block)
  _, short_BTD = cells.apply(cell, parameters(), short)
  assert_close(short_BTD[0], y_BTD[1, : W + 2])


def test_inputs_are_dropped():
  """All rows share one mask. Measured where layers add zeros."""
  block = cells.example()
  ones = block.replace(x=np.ones_like(block.x))
  still, cell = jax.tree.map(np.zeros_like, parameters()), encode(True)
  cell = cell.clone(dropout=0.5)
  rngs = {'dropout': jax.random.key(0)}
  _, y_BTD = cells.apply(cell, still, ones, rngs=rngs)
  assert set(np.unique(y_BTD)) == {0.0, 2.0}
  np.testing.assert_array_equal(y_BTD[0], y_BTD[1])
  np.testing.assert_array_equal(cells.apply(cell, still, ones)[1], ones.x)


def test_is_one_layer_after_another():
  """All layers read the same memory."""
  count = 2
  made = transformer(count, True)
  x_BTD, mask_BT = example().x, example().mask
  slots = np.random.default_rng(0).normal(size=(B, S, D)).astype(np.float32)
  params = jax.jit(made.init)(jax.random.key(0), x_BTD, mask_BT, slots)[
    'params'
  ]
  apply = lambda module, params, x: jax.jit(module.apply)(
    {'params': params}, x, mask_BT, slots
  )
  y_BTD = apply(made, params, x_BTD)
  one = EncoderLayer(encoder_config(), reads_memory=True)
  for i in range(count):
    x_BTD = apply(one, params[f'layers_{i}'], x_BTD)
  assert_close(y_BTD, x_BTD)
  a, b = (params[f'layers_{i}']['mlp']['hidden']['kernel'] for i in (0, 1))
  assert np.abs(a - b).max() > 0.1
