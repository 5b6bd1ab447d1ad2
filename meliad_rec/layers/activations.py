"""What an MLP does with its hidden units."""

import jax


def relu(h):
  """The positive part."""
  return jax.nn.relu(h)


def gelu(h):
  """h, times the normal distribution function (Hendrycks and Gimpel 2016)."""
  return jax.nn.gelu(h, approximate=False)
