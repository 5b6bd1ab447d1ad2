"""Relative positions, and attention spans that heads learn.

A position module makes logits depend on the distance between query and key. To
do so, it adds a bias to logits, rotates queries and keys, or adds vectors to
keys.
"""

from typing import ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.distributed.partition import path_string
from meliad_rec.kernels.reference import MASKED


class Position(nn.Module):
  """Base class of position modules. Its methods ignore positions.

  Attributes:
    num_heads: number of attention heads H.
    two_sided: whether the roles of `rotate` and `rotate_keys` are exchanged
      for keys later than the query: `rotate_keys` is then for the queries, and
      `rotate` for the keys.
    keeps_length: whether `rotate` and `rotate_keys` keep the length of vectors.
  """

  num_heads: int
  two_sided: ClassVar[bool] = False
  keeps_length: ClassVar[bool] = True

  def bias(self, steps_back):
    """Returns the bias added to logits, [H, W] float32.

    Args:
      steps_back: int [W], distances in tokens from a query back to its keys.
    """
    return jnp.zeros((self.num_heads, len(steps_back)))

  def rotate(self, x_BSHK, first):
    """Returns queries [B, S, H, K], rotated if the class rotates.

    `first` is the position of the first of them, an int or int32 scalar.
    """
    return x_BSHK

  def rotate_keys(self, x_BSHK, first):
    """Returns keys [B, S, H, K], rotated if the class rotates.

    `first` is the position of the first of them, an int or int32 scalar.
    """
    return self.rotate(x_BSHK, first)

  def keys(self, steps_back, head_dim):
    """Returns the vector added to a key at each distance, [W, K] float32.

    None means that nothing is added.

    Args:
      steps_back: see `bias`.
      head_dim: width of a head K.
    """


class NoPosition(Position):
  """Module that ignores positions."""


class T5Bias(Position):
  """Learned bias by logarithmic buckets of distance (Raffel et al. 2020).

  Attributes:
    buckets: number of buckets, each with one learned bias per head.
    max_distance: distances from this one on share the last bucket.
    start: initial values of the biases. 'alibi' sets each to the mean of the
      ALiBi biases of the distances in its bucket that are below max_distance.
      'normal' draws random numbers, as published. With random numbers, a small
      model needs thousands of training steps before it prefers near tokens, and
      more with a wider window.
  """

  buckets: int = 32
  max_distance: int = 128
  start: str = 'alibi'

  def setup(self):
    if not 2 <= self.buckets < 2 * self.max_distance:
      raise ValueError(
        f'buckets must be from 2 to {2 * self.max_distance - 1}, below twice '
        f'max_distance, got {self.buckets}. Set positions.T5Bias.buckets or '
        'max_distance.'
      )
    match self.start:
      case 'alibi':
        init = lambda _, shape: self._alibi_table()
      case 'normal':
        init = nn.initializers.normal(self.buckets**-0.5)
      case _:
        raise ValueError(
          f"start must be 'alibi' or 'normal', got {self.start!r}. Set "
          'positions.T5Bias.start.'
        )
    shape = self.num_heads, self.buckets
    self.table_HN = self.param('table', init, shape)

  def _alibi_table(self):
    back = np.arange(max(self.max_distance, self.buckets))
    bucket = t5_bucket(back, self.buckets, self.max_distance)
    count_N = np.maximum(np.bincount(bucket, minlength=self.buckets), 1)
    mean_N = np.bincount(bucket, back, self.buckets) / count_N
    return ALiBi(self.num_heads).bias(mean_N)

  def bias(self, steps_back):
    bucket_W = t5_bucket(steps_back, self.buckets, self.max_distance)
    # A one-hot product, because gathers, and scatters in their gradients, are
    # slow. By default, a TPU would round the table to bfloat16.
    one_hot_NW = np.eye(self.buckets, dtype=np.float32)[bucket_W].T
    return jnp.matmul(self.table_HN, one_hot_NW, precision='highest')


class ALiBi(Position):
  """Bias that falls linearly with distance, with a fixed slope for each head.

  Press et al. 2022.
  """

  def bias(self, steps_back):
    slope_H = 2.0 ** (-8.0 * np.arange(1, self.num_heads + 1) / self.num_heads)
    return jnp.asarray(-slope_H[:, None] * steps_back[None], jnp.float32)


def sinusoids(length: int, width: int) -> np.ndarray:
  """Returns vectors that are added to the embeddings of positions 0, 1, ...

  The first half of a vector holds sines and the second half cosines, with wave
  lengths from 2 pi to 20,000 pi tokens in a geometric progression (Vaswani et
  al. 2017, section 3.5, where sines and cosines alternate).

  Args:
    length: number of positions T.
    width: even number D.

  Returns:
    [T, D] float32.

  Raises:
    ValueError: the width is odd.
  """
  if width % 2:
    raise ValueError(
      f'Sinusoids need an even width, got {width}. Make D_MODEL even.'
    )
  rate_F = 10_000.0 ** -np.linspace(0, 1, width // 2)
  angle_TF = np.arange(length)[:, None] * rate_F
  waves = [np.sin(angle_TF), np.cos(angle_TF)]
  return np.concatenate(waves, 1).astype(np.float32)


class RoPE(Position):
  """Rotation of queries and keys by their position (Su et al. 2021).

  Attributes:
    base: the fastest of K / 2 pairs turns by 1 radian per token, pair i by
      base ** (-2 i / K).

  Raises:
    ValueError: the width K of a head is odd.
  """

  base: float = 10_000.0

  def rotate(self, x_BSHK, first):
    S, K = x_BSHK.shape[1], x_BSHK.shape[3]
    if K % 2:
      raise ValueError(
        f'head_dim must be even, as RoPE rotates pairs, got {K}. Set HEAD_DIM.'
      )
    rate_K = self.base ** (-jnp.arange(0, K, 2) / K)
    angle_SK = (first + jnp.arange(S))[:, None] * rate_K
    cos, sin = jnp.cos(angle_SK)[:, None], jnp.sin(angle_SK)[:, None]
    a, b = jnp.split(x_BSHK.astype(jnp.float32), 2, -1)
    y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return y.astype(x_BSHK.dtype)


class XPos(RoPE):
  """RoPE whose products of queries and keys decay with distance.

  Sun et al. 2022, section 2. RoPE rotates pairs of elements; pairs that rotate
  more slowly also decay more slowly. The decay is one-sided: for keys later
  than the query, which causal attention does not see, products grow with
  distance. In the pair that rotates fastest, they grow by a factor of 1.3 at
  100 tokens, 11.5 at 1,000 and 22,500 at 4,096. For long texts with attention
  that is not causal, use SymmetricXPos.

  Attributes:
    base: see RoPE.
    scale: distance in tokens over which the product of a pair falls by its
      factor zeta, which is 0.29 for the fastest pair.
  """

  keeps_length: ClassVar[bool] = False
  scale: float = 512.0

  def rotate(self, x_BSHK, first):
    return self._decay(x_BSHK, first, 1)

  def rotate_keys(self, x_BSHK, first):
    return self._decay(x_BSHK, first, -1)

  def _decay(self, x_BSHK, first, sign):
    S, K = x_BSHK.shape[1], x_BSHK.shape[3]
    # Beyond, the factor of the fastest pair exceeds the numbers of float32.
    if (limit := int(64 * self.scale)) < S:
      raise ValueError(
        f'xPos is limited to {limit:,} tokens of a segment and its window, got '
        f'{S:,}. Choose shorter segments, or set positions.XPos.scale.'
      )
    zeta_K = (jnp.arange(0, K, 2) + 0.4 * K) / (1.4 * K)
    power_S = sign * (first + jnp.arange(S)) / self.scale
    decay_SK = jnp.tile(zeta_K ** power_S[:, None], (1, 2))
    y = super().rotate(x_BSHK.astype(jnp.float32), first) * decay_SK[:, None]
    return y.astype(x_BSHK.dtype)


class SymmetricXPos(XPos):
  """XPos whose products decay with distance on both sides of a query."""

  two_sided: ClassVar[bool] = True


class RelativeKeys(Position):
  """Learned vectors added to keys, one per distance, the same in all heads.

  Shaw et al. 2018, eq. 4.
  """

  @nn.compact
  def keys(self, steps_back, head_dim):
    shape = len(steps_back), head_dim
    return self.param('table', nn.initializers.normal(1.0), shape)


def t5_bucket(steps_back, buckets: int, max_distance: int):
  """Returns the index of the T5 bucket of each distance.

  The first half of the buckets hold one distance each, from 0. The others hold
  ranges of equal width in the logarithm of the distance, up to `max_distance`.
  Longer distances are in the last bucket.

  Args:
    steps_back: int [W], distances in tokens from a query back to its keys.
    buckets: number of buckets.
    max_distance: see T5Bias.
  """
  exact = buckets // 2
  far = np.log(np.maximum(steps_back, 1) / exact) / np.log(max_distance / exact)
  far = exact + (far * (buckets - exact)).astype(int)
  return np.where(
    steps_back < exact, steps_back, np.clip(far, exact, buckets - 1)
  )


class AdaptiveSpan(nn.Module):
  """Attention span that each head learns (Sukhbaatar et al. 2019).

  W is the number of keys in the window. The span of a head is z W keys, where
  the ratio z is learned and starts at 0. A key that is x tokens before the
  nearest key of the window has the weight m(x). It is 1 if x is at most the
  span, and falls linearly to 0 over the next R keys. Multiplying probabilities
  by m and renormalizing them equals adding log m to the logits.

  Attributes:
    num_heads: number of attention heads H.
    ramp: number of keys R over which the weight falls from 1 to 0.
    penalty: factor of a loss: `penalty` times the mean span of the heads in
      keys. The loss is added to the model's loss in nats per token. It is sown
      in the collection 'losses' if that is mutable.
  """

  num_heads: int
  ramp: int = 32
  penalty: float = 5e-7

  def setup(self):
    if self.ramp < 1 or self.penalty < 0:
      raise ValueError(
        'ramp must be at least 1 and penalty at least 0, got '
        f'ramp={self.ramp}, penalty={self.penalty}. Set '
        'positions.AdaptiveSpan.ramp or positions.AdaptiveSpan.penalty.'
      )
    self.ratio_H = self.param('ratio', nn.initializers.zeros, (self.num_heads,))

  def bias(self, window: int):
    """Returns log m(x) for x from 0 to W - 1, [H, W] float32; W = window.

    It is MASKED where the weight m(x) is 0.
    """
    self.penalize(window)
    z_HW = clipped(self.ratio_H)[:, None] * window
    m_HW = (z_HW - np.arange(window)) / self.ramp + 1
    # Off the ramp, 1 takes the place of m: gradients must be finite there too,
    # even if `where` drops them.
    ramp_HW = jnp.where((m_HW > 0) & (m_HW < 1), m_HW, 1)
    return jnp.where(m_HW > 0, jnp.log(ramp_HW), MASKED)

  def penalize(self, window: int):
    """Sows the loss of the mean span of the heads.

    `bias` calls this method. A cell that calls `bias` where nothing can be sown
    must also call `penalize` where it can. The loss counts once per call of the
    model, however often `bias` is called: a new loss replaces the last one, and
    scans over blocks, or over repeats that share parameters, average it.
    """
    if self.is_initializing():
      return
    span = window * jnp.mean(clipped(self.ratio_H))
    last = {'reduce_fn': lambda _, new: new, 'init_fn': lambda: None}
    self.sow('losses', 'span', self.penalty * span, **last)


def clipped(z):
  """Returns z clipped to [0, 1], with the gradient of the identity.

  Gradients that point out of [0, 1] are kept. A scan over blocks adds up the
  gradients of its blocks; if some of them were dropped, the sum would depend on
  where blocks begin. `clip_spans` keeps z from drifting.
  """
  return z + jax.lax.stop_gradient(jnp.clip(z, 0, 1) - z)


def clip_spans(params):
  """Returns the parameters, with the ratios z of adaptive spans clipped.

  Every training step ends with clipping z to [0, 1], as in the code of
  Sukhbaatar et al. 2019. Without it, gradients could move z further and further
  out of [0, 1].
  """

  def clip(path, leaf):
    is_ratio = path_string(path[-2:]) == 'span/ratio'
    return jnp.clip(leaf, 0, 1) if is_ratio else leaf

  return jax.tree_util.tree_map_with_path(clip, params)
