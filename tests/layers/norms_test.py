"""Norms against NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.layers import activations
from meliad_rec.layers import norms

B, T, D = 2, 3, 7
X = np.random.default_rng(0).normal(2, 3, (B, T, D)).astype(np.float32)
SCALE, BIAS = np.random.default_rng(1).normal(size=(2, D)).astype(np.float32)


def test_rms_norm():
  y = norms.RMSNorm().apply({'params': {'scale': SCALE}}, X)
  expected = X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-6) * SCALE
  np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_layer_norm():
  y = norms.LayerNorm().apply({'params': {'scale': SCALE, 'bias': BIAS}}, X)
  centred = X - X.mean(-1, keepdims=True)
  expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
  np.testing.assert_allclose(y, expected * SCALE + BIAS, rtol=1e-4, atol=1e-5)


def test_layer_norm_of_what_hardly_varies_is_small():
  """1e-5 is added to the variance, which here is 4e-6."""
  x = np.array([1.002, 0.998], np.float32)
  y, _ = norms.LayerNorm().init_with_output(jax.random.key(0), x)
  np.testing.assert_allclose(y, (x - 1) / np.sqrt(4e-6 + 1e-5), rtol=0.05)


@pytest.mark.parametrize('norm', [norms.RMSNorm, norms.LayerNorm])
def test_statistics_and_parameters_are_float32(norm):
  x = jnp.asarray(X * 1e-3 + 1, jnp.bfloat16)
  y, params = norm(dtype='bfloat16').init_with_output(jax.random.key(0), x)
  assert y.dtype == jnp.bfloat16
  assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(params))
  exact = norm().apply(params, x.astype(jnp.float32))
  np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))


def test_no_norm_is_x_in_the_dtype_of_a_norm():
  y, params = norms.NoNorm().init_with_output(jax.random.key(0), X)
  assert y is X and params == {}
  y, params = norms.NoNorm(dtype='bfloat16').init_with_output(
    jax.random.key(0), X
  )
  assert params == {}
  np.testing.assert_array_equal(y, X.astype(jnp.bfloat16))


H = np.linspace(-4, 4, 23, dtype=np.float32)


def test_relu():
  np.testing.assert_array_equal(activations.relu(H), np.maximum(H, 0))


def test_gelu_is_the_exact_one():
  below = [(1 + math.erf(h / math.sqrt(2))) / 2 for h in H.tolist()]
  np.testing.assert_allclose(activations.gelu(H), H * below, atol=2e-6)
