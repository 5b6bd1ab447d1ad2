"""Relative positions: what the distance between a query and a key changes.

Attention spans that heads learn (Sukhbaatar et al. 2019).

A key x steps from the nearest one counts by m(x), which is 1 up to the span z W
of the head and falls to 0 over the R keys behind it. Multiplying probabilities
by m and dividing by their new sum is adding log m to the logits.
"""

from typing import ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.kernels.reference import NEVER


class NoPosition(nn.Module):
  """Positions change nothing; also the base class of those that do.

  Attributes:
    num_heads: attention heads.
    two_sided: whether keys behind a query take rotate_keys for queries and
      rotate for keys.
    keeps_length: whether vectors are as long as before when rotated.
  """

  num_heads: int
  two_sided: ClassVar[bool] = False
  keeps_length: ClassVar[bool] = True

  def bias(self, steps_back):
    """Bias of the logits of keys so many steps back: [H, W] float32."""
    return jnp.zeros((self.num_heads, len(steps_back)))

  def rotate(self, x_BSHK, first):
    """Queries, the first of which stands at position `first`."""
    return x_BSHK

  def rotate_keys(self, x_BSHK, first):
    """Keys, the first of which stands at position `first`."""
    return self.rotate(x_BSHK, first)

  def keys(self, steps_back, head_dim):
    """Added to keys so many steps back: [W, K] float32; None: nothing."""


class T5Bias(NoPosition):
  """Learned bias by logarithmic buckets of distance (Raffel et al. 2020)."""

  buckets: int = 32
  max_distance: int = 128

  def setup(self):
    self.table_HN = self.param(
      'table',
      nn.initializers.normal(self.buckets**-0.5),
      (self.num_heads, self.buckets),
    )

  def bias(self, steps_back):
    bucket_W = t5_bucket(steps_back, self.buckets, self.max_distance)
    # A one-hot product: gathers, and the scatters of their gradients, are slow.
    return self.table_HN @ np.eye(self.buckets, dtype=np.float32)[bucket_W].T


class ALiBi(NoPosition):
  """Bias that falls with distance, a fixed slope a head (Press et al. 2022)."""

  def bias(self, steps_back):
    slope_H = 2.0 ** (-8.0 * np.arange(1, self.num_heads + 1) / self.num_heads)
    return jnp.asarray(-slope_H[:, None] * steps_back[None], jnp.float32)


class RoPE(NoPosition):
  """Rotation of queries and keys by their position (Su et al. 2021)."""

  base: float = 10_000.0

  def rotate(self, x_BSHK, first):
    S, K = x_BSHK.shape[1], x_BSHK.shape[3]
    if K % 2:
      raise ValueError(
        f'RoPE rotates pairs; the head width is {K}. Set HEAD_DIM even.'
      )
    rate_K = self.base ** (-jnp.arange(0, K, 2) / K)
    angle_SK = (first + jnp.arange(S))[:, None] * rate_K
    cos, sin = jnp.cos(angle_SK)[:, None], jnp.sin(angle_SK)[:, None]
    a, b = jnp.split(x_BSHK.astype(jnp.float32), 2, -1)
    y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return y.astype(x_BSHK.dtype)


class XPos(RoPE):
  """RoPE, and a decay with distance, slow for pairs that turn slowly.

  Sun et al. 2022, section 2. The decay has one side: keys behind a query (there
  are none where attention is causal) grow with distance instead, those that
  turn fastest 1.3 times at 100 tokens, 11.5 times at 1,000 and 22,500 times at
  4,096. SymmetricXPos is for texts so long that are read from both sides.
  """

  keeps_length: ClassVar[bool] = False
  scale: float = 512.0

  def rotate(self, x_BSHK, first):
    return self._decay(x_BSHK, first, 1)

  def rotate_keys(self, x_BSHK, first):
    return self._decay(x_BSHK, first, -1)

  def _decay(self, x_BSHK, first, sign):
    S, K = x_BSHK.shape[1], x_BSHK.shape[3]
    zeta_K = (jnp.arange(0, K, 2) + 0.4 * K) / (1.4 * K)
    power_S = sign * (first + jnp.arange(S)) / self.scale
    decay_SK = jnp.tile(zeta_K ** power_S[:, None], (1, 2))
    y = super().rotate(x_BSHK.astype(jnp.float32), first) * decay_SK[:, None]
    return y.astype(x_BSHK.dtype)


class SymmetricXPos(XPos):
  """XPos that decays with distance on both sides of a query."""

  two_sided: ClassVar[bool] = True


class RelativeKeys(NoPosition):
  """A learned vector a distance, for all heads (Shaw et al. 2018, eq. 4)."""

  @nn.compact
  def keys(self, steps_back, head_dim):
    shape = len(steps_back), head_dim
    return self.param('table', nn.initializers.normal(1.0), shape)


def t5_bucket(steps_back, buckets: int, max_distance: int):
  """Causal T5 buckets: half of them exact, the rest spaced by logarithm."""
  exact = buckets // 2
  far = np.log(np.maximum(steps_back, 1) / exact) / np.log(max_distance / exact)
  far = exact + (far * (buckets - exact)).astype(int)
  return np.where(
    steps_back < exact, steps_back, np.clip(far, exact, buckets - 1)
  )


class AdaptiveSpan(nn.Module):
  """A learned share z of the window for each head; at first 0.

  Attributes:
    num_heads: attention heads.
    ramp: keys R over which the mask falls from 1 to 0.
    penalty: what a span of one token more costs a layer, in nats a token. It is
      sown in 'losses' where that collection is mutable.
  """

  num_heads: int
  ramp: int = 32
  penalty: float = 5e-7

  def setup(self):
    if self.ramp < 1 or self.penalty < 0:
      raise ValueError(
        f'The ramp is {self.ramp} keys, and the penalty {self.penalty}; set '
        'span.AdaptiveSpan.ramp to 1 or more, and penalty to 0 or more.'
      )
    self.ratio_H = self.param('ratio', nn.initializers.zeros, (self.num_heads,))

  def bias(self, window: int):
    """Added to logits by distance, [H, W] float32: log m, NEVER for m = 0."""
    self.penalise(window)
    z_HW = inward(self.ratio_H)[:, None] * window
    m_HW = (z_HW - np.arange(window)) / self.ramp + 1
    # Only on the ramp, or the gradients that `where` drops would be infinite.
    ramp_HW = jnp.where((m_HW > 0) & (m_HW < 1), m_HW, 1)
    return jnp.where(m_HW > 0, jnp.log(ramp_HW), NEVER)

  def penalise(self, window: int):
    """Sows the loss; for cells that call `bias` only where nothing is sown.

    Once a call of the model, however often it reads the bias: scans over blocks
    and over repeats that share it count the mean.
    """
    if self.is_initializing():
      return
    span = window * jnp.mean(inward(self.ratio_H))
    last = {'reduce_fn': lambda _, new: new, 'init_fn': lambda: None}
    self.sow('losses', 'span', self.penalty * span, **last)


@jax.custom_vjp
def inward(z):
  """z clipped to [0, 1]; no gradient moves it further out.

  The authors' code clips z itself after each step; optimisers here do not. With
  the gradient of the clip alone, a z that left [0, 1] would never come back.
  With that of the identity, the task could drive it below 0 for ever. So out
  there, only gradients pass that lead back.
  """
  return jnp.clip(z, 0, 1)


def _forward(z):
  return inward(z), z


def _backward(z, g):
  g = jnp.where(z < 0, jnp.minimum(g, 0), g)
  return (jnp.where(z > 1, jnp.maximum(g, 0), g),)


inward.defvjp(_forward, _backward)
