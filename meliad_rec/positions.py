"""Relative positions: what the distance between a query and a key changes."""

from flax import linen as nn
import jax.numpy as jnp
import numpy as np


class NoPosition(nn.Module):
  """Positions change nothing; also the base class of those that do."""

  heads: int

  def bias(self, steps_back):
    """Bias of the logits of keys so many steps back: [H, W] float32."""
    return jnp.zeros((self.heads, len(steps_back)))

  def rotate(self, x_BSHK, first):
    """Queries or keys, the first of which stands at position `first`."""
    return x_BSHK

  def keys(self, steps_back, head_width):
    """Added to keys so many steps back: [W, K] float32; None: nothing."""


class T5Bias(NoPosition):
  """Learned bias by logarithmic buckets of distance (Raffel et al. 2020)."""

  buckets: int = 32
  max_distance: int = 128

  def setup(self):
    self.table_HN = self.param(
      'table',
      nn.initializers.normal(self.buckets**-0.5),
      (self.heads, self.buckets),
    )

  def bias(self, steps_back):
    bucket_W = t5_bucket(steps_back, self.buckets, self.max_distance)
    # A one-hot product: gathers, and the scatters of their gradients, are slow.
    return self.table_HN @ np.eye(self.buckets, dtype=np.float32)[bucket_W].T


class ALiBi(NoPosition):
  """Bias that falls with distance, a fixed slope a head (Press et al. 2022)."""

  def bias(self, steps_back):
    slope_H = 2.0 ** (-8.0 * np.arange(1, self.heads + 1) / self.heads)
    return jnp.asarray(-slope_H[:, None] * steps_back[None], jnp.float32)


class RoPE(NoPosition):
  """Rotation of queries and keys by their position (Su et al. 2021)."""

  base: float = 10_000.0

  def rotate(self, x_BSHK, first):
    S, K = x_BSHK.shape[1], x_BSHK.shape[3]
    if K % 2:
      raise ValueError(
        f'RoPE rotates pairs; the head width is {K}. Set HEAD_WIDTH even.'
      )
    rate_K = self.base ** (-jnp.arange(0, K, 2) / K)
    angle_SK = (first + jnp.arange(S))[:, None] * rate_K
    cos, sin = jnp.cos(angle_SK)[:, None], jnp.sin(angle_SK)[:, None]
    a, b = jnp.split(x_BSHK.astype(jnp.float32), 2, -1)
    y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return y.astype(x_BSHK.dtype)


class RelativeKeys(NoPosition):
  """A learned vector a distance, for all heads (Shaw et al. 2018, eq. 4)."""

  @nn.compact
  def keys(self, steps_back, head_width):
    shape = len(steps_back), head_width
    return self.param('table', nn.initializers.normal(1.0), shape)


def t5_bucket(steps_back, buckets: int, max_distance: int):
  """Causal T5 buckets: half of them exact, the rest spaced by logarithm."""
  exact = buckets // 2
  far = np.log(np.maximum(steps_back, 1) / exact) / np.log(max_distance / exact)
  far = exact + (far * (buckets - exact)).astype(int)
  return np.where(
    steps_back < exact, steps_back, np.clip(far, exact, buckets - 1)
  )
