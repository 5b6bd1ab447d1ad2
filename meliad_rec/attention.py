"""Keys and values, and the linear maps to heads."""

from collections.abc import Callable

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.kernels.window_attention_ref import unit


class KV(struct.PyTreeNode):
  """Keys and values, oldest first."""

  k: jax.Array  # [B, S, H, K]
  v: jax.Array  # [B, S, H, K]
  mask: jax.Array  # [B, S] bool, False at keys nobody may see.

  @classmethod
  def empty(cls, batch, length, heads, head_width, dtype, visible=False):
    """Zeros; masked, or visible as in meliad (see LayerConfig)."""
    zeros = jnp.zeros((batch, length, heads, head_width), dtype)
    return cls(zeros, zeros, jnp.full((batch, length), visible))

  def append(self, new: 'KV') -> 'KV':
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), self, new)

  def last(self, length: int) -> 'KV':
    return jax.tree.map(lambda a: a[:, a.shape[1] - length :], self)


class Heads(nn.Module):
  """Linear map to heads: [B, S, D] -> [B, S, H, K]. No bias."""

  heads: int
  head_width: int
  normalize: bool  # To unit length.
  dtype: str
  first: Callable = nn.initializers.lecun_normal()  # Of the first weights.

  @nn.compact
  def __call__(self, x_BSD):
    shape = x_BSD.shape[-1], self.heads * self.head_width
    kernel_DF = self.param('kernel', self.first, shape)
    y = x_BSD.astype(self.dtype) @ kernel_DF.astype(self.dtype)
    y = y.reshape(*y.shape[:2], self.heads, self.head_width)
    return unit(y) if self.normalize else y
