"""Norms of a layer's inputs, with statistics in float32."""

from flax import linen as nn


class RMSNorm(nn.RMSNorm):
  """x by its root mean square, times a scale (Zhang and Sennrich 2019)."""


class LayerNorm(nn.LayerNorm):
  """Mean taken off too, and a bias added (Ba et al. 2016)."""

  epsilon: float = 1e-5  # As in PyTorch.


class NoNorm(nn.Module):
  """x as it is, in the dtype that a norm would give; without parameters."""

  dtype: str | None = None

  def __call__(self, x):
    return x if self.dtype is None else x.astype(self.dtype)
