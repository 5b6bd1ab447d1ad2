"""Norms, with statistics in float32."""

from flax import linen as nn


class RMSNorm(nn.RMSNorm):
  """Normalization to root mean square 1, followed by a learned scale.

  Zhang and Sennrich 2019.
  """


class LayerNorm(nn.LayerNorm):
  """Normalization to mean 0 and variance 1, then a learned scale and bias.

  Ba et al. 2016.
  """

  epsilon: float = 1e-5  # As in PyTorch.


class NoNorm(nn.Module):
  """Cast of x to `dtype`, in place of a norm.

  If `dtype` is None, x keeps its dtype. There are no parameters.
  """

  dtype: str | None = None

  def __call__(self, x):
    return x if self.dtype is None else x.astype(self.dtype)
