"""The plain transformer: layers one after another, each its own."""

import functools

import jax
import numpy as np
import pytest

from meliad_rec.archs.transformer import Layers
from meliad_rec.layers.core_layer import CoreLayer
from tests.architectures import core_config
from tests.architectures import D
from tests.architectures import S
from tests.architectures import transformer

B, T, COUNT = 3, 6, 3


def example(memory):
  rng = np.random.default_rng(0)
  x_BTD = rng.normal(size=(B, T, D)).astype(np.float32)
  mask_BT = np.arange(T) < np.array([T, 4, 0])[:, None]
  slots = rng.normal(size=(B, S, D)).astype(np.float32)
  return x_BTD, mask_BT, slots if memory else None


@pytest.mark.parametrize('memory', [False, True])
def test_is_one_layer_after_another(memory):
  """All of which read the same memory."""
  made, (x_BTD, *rest) = transformer(COUNT, memory), example(memory)
  init = jax.jit(lambda rng: made.init(rng, x_BTD, *rest)['params'])
  params = init(jax.random.key(0))
  y_BTD = made.apply({'params': params}, x_BTD, *rest)
  one = CoreLayer(core_config(), memory)
  for i in range(COUNT):
    x_BTD = one.apply({'params': params[f'layers_{i}']}, x_BTD, *rest)
  np.testing.assert_allclose(y_BTD, x_BTD, rtol=1e-5, atol=1e-6)
  assert set(params) == {f'layers_{i}' for i in range(COUNT)}
  a, b = (params[f'layers_{i}']['mlp']['hidden']['kernel'] for i in (0, 1))
  assert np.abs(a - b).max() > 0.1


@pytest.mark.parametrize('causal', [False, True])
def test_causal(causal):
  x_BTD, mask_BT, _ = example(False)
  layer = functools.partial(CoreLayer, core_config(causal))
  made = Layers(layer, 2)
  params = jax.jit(made.init)(jax.random.key(0), x_BTD, mask_BT)
  early_TD = np.arange(T)[:, None] < 3
  all_BTD = made.apply(params, -x_BTD, mask_BT)
  some_BTD = made.apply(params, np.where(early_TD, -x_BTD, x_BTD), mask_BT)
  same = np.abs(all_BTD - some_BTD)[0, :3].max() < 1e-6
  assert same == causal == made.causal


def test_layers_are_needed():
  with pytest.raises(ValueError, match='transformer of 0 layers; set LAYERS'):
    transformer(0).init(jax.random.key(0), *example(False))


def test_layers_are_left_out_in_training_alone():
  x_BTD, *rest = example(False)
  layer = functools.partial(CoreLayer, core_config())
  made = lambda rate: Layers(layer, COUNT, layer_drop=rate)
  params = jax.jit(made(0.0).init)(jax.random.key(0), x_BTD, *rest)
  apply = jax.jit(lambda rngs: made(0.9).apply(params, x_BTD, *rest, rngs=rngs))
  whole = made(0.0).apply(params, x_BTD, *rest)
  np.testing.assert_allclose(apply({}), whole, rtol=1e-4, atol=1e-5)
  found = [apply({'dropout': jax.random.key(seed)}) for seed in range(4)]
  # With every layer left out, what comes out is what came in.
  assert min(np.abs(y_BTD - x_BTD).max() for y_BTD in found) == 0
