"""Activations against the formulas."""

import math

import numpy as np

from meliad_rec.layers import activations

H = np.linspace(-4, 4, 23, dtype=np.float32)


def test_relu():
  np.testing.assert_array_equal(activations.relu(H), np.maximum(H, 0))


def test_gelu_is_the_exact_one():
  below = [(1 + math.erf(h / math.sqrt(2))) / 2 for h in H.tolist()]
  np.testing.assert_allclose(activations.gelu(H), H * below, atol=2e-6)
