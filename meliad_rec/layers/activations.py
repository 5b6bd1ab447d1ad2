"""Activation functions of MLPs."""

import jax


def relu(h):
  """Returns max(h, 0)."""
  return jax.nn.relu(h)


def gelu(h):
  """Returns h times the normal CDF at h (Hendrycks and Gimpel 2016)."""
  return jax.nn.gelu(h, approximate=False)
