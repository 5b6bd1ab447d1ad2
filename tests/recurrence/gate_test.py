"""The halting gate against plain equations, and means over tokens."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.recurrence.halt import HaltingGate
from meliad_rec.recurrence.halt import mean
from tests.cells import assert_close

B, T, D, F = 3, 5, 20, 28


def vectors(count, dtype='float32'):
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.normal(size=(B, T, D)), dtype) for _ in range(count)]


@pytest.mark.parametrize('count', [1, 2])
def test_is_the_papers_equation(count):
  h = vectors(count)
  p_BT, variables = HaltingGate(F).init_with_output(jax.random.key(0), *h)
  params = jax.tree.map(np.float64, variables['params'])
  h_BTX = np.concatenate([np.float64(a) for a in h], -1)
  x_BTF = h_BTX @ params['hidden']['kernel'] + params['hidden']['bias']
  # The exact form of GELU.
  x_BTF = x_BTF * 0.5 * (1 + np.vectorize(math.erf)(x_BTF / 2**0.5))
  z_BT = (x_BTF @ params['last']['kernel'] + params['last']['bias'])[..., 0]
  np.testing.assert_allclose(p_BT, 1 / (1 + np.exp(-z_BT)), rtol=1e-5)


@pytest.mark.parametrize('bias, p', [(0.0, 0.5), (-3.0, 0.047426)])
def test_bias_is_where_a_new_gate_stands(bias, p):
  zeros = jnp.zeros((B, T, D))
  gate = HaltingGate(F, bias)
  p_BT, variables = gate.init_with_output(jax.random.key(0), zeros)
  np.testing.assert_allclose(p_BT, np.full((B, T), p), rtol=1e-5)
  # Uniform, to one by the root of the inputs.
  for name, inputs in (('hidden', D), ('last', F)):
    kernel = variables['params'][name]['kernel']
    assert 0.8 < np.abs(kernel).max() * inputs**0.5 <= 1


def test_bfloat16_vectors_are_judged_in_float32():
  h = vectors(2, 'bfloat16')
  p_BT, variables = HaltingGate(F).init_with_output(jax.random.key(0), *h)
  assert p_BT.dtype == jnp.float32
  wide = [a.astype(jnp.float32) for a in h]
  np.testing.assert_array_equal(p_BT, HaltingGate(F).apply(variables, *wide))
  assert len(set(np.asarray(p_BT.astype(jnp.bfloat16)).ravel())) < B * T
  assert len(set(np.asarray(p_BT).ravel())) == B * T


@pytest.mark.parametrize('causal', [False, True])
def test_means_leave_padding_out(causal):
  (h_BTD,) = vectors(1)
  mask_BT = np.arange(T) < np.array([T, 3, 0])[:, None]
  found = mean(h_BTD, mask_BT, causal)
  expected = np.zeros((B, T if causal else 1, D))
  for b in range(B):
    for t in range(T if causal else 1):
      seen = mask_BT[b] & (np.arange(T) <= t if causal else True)
      if seen.any():
        expected[b, t] = np.float64(h_BTD)[b, seen].mean(0)
  assert_close(found, expected)
  junk_BTD = h_BTD + 100 * ~mask_BT[..., None]
  np.testing.assert_array_equal(mean(junk_BTD, mask_BT, causal), found)


def test_means_of_bfloat16_are_added_up_in_float32():
  """In bfloat16 a sum of ones stays at 256."""
  ones = jnp.ones((1, 1000, 1), jnp.bfloat16)
  for causal in (False, True):
    found = mean(ones, np.ones((1, 1000), bool), causal)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.ones_like(found))
