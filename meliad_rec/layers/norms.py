"""Norms, with statistics in float32."""

from flax import linen as nn


class RMSNorm(nn.RMSNorm):
  """x divided by its root mean square, times a learned scale.

  Zhang and Sennrich 2019.
  """


class LayerNorm(nn.LayerNorm):
  """Norm that also subtracts the mean and adds a bias (Ba et al. 2016)."""

  epsilon: float = 1e-5  # As in PyTorch.


class NoNorm(nn.Module):
  """Identity in place of a norm: casts x to `dtype`; has no parameters."""

  dtype: str | None = None

  def __call__(self, x):
    return x if self.dtype is None else x.astype(self.dtype)
