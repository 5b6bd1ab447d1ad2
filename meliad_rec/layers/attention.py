"""Keys and values, and the linear maps to heads."""

from collections.abc import Callable

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.kernels.reference import normalize_own_keys
from meliad_rec.kernels.reference import unit


class KV(struct.PyTreeNode):
  """Keys and values, oldest first.

  Attributes:
    k, v: [B, S, H, K].
    mask: [B, S] bool, False at keys nobody may see.
    raw: how many of the newest keys are still to be brought to unit length, by
      whoever reads them. Kernels for TPU do so on their way, which spares time
      where most keys are read by their own segment alone.
  """

  k: jax.Array
  v: jax.Array
  mask: jax.Array
  unnormalized: int = struct.field(pytree_node=False, default=0)

  @classmethod
  def empty(cls, batch, length, heads, head_dim, dtype, visible=False):
    """Zeros; masked, or visible as in meliad (see LayerConfig)."""
    zeros = jnp.zeros((batch, length, heads, head_dim), dtype)
    return cls(zeros, zeros, jnp.full((batch, length), visible))

  def append(self, new: 'KV') -> 'KV':
    """Both; of these, none may be raw."""
    joined = lambda a, b: jnp.concatenate([a, b], 1)
    return jax.tree.map(joined, self, new.replace(unnormalized=0)).replace(
      unnormalized=new.unnormalized
    )

  def last(self, length: int) -> 'KV':
    """The newest, none of them raw."""
    part = jax.tree.map(lambda a: a[:, a.shape[1] - length :], self)
    return part.replace(
      unnormalized=min(self.unnormalized, length)
    ).normalized()

  def normalized(self) -> 'KV':
    """The same, no key raw."""
    if not self.unnormalized:
      return self
    return self.replace(
      k=normalize_own_keys(self.k, self.unnormalized), unnormalized=0
    )


class Heads(nn.Module):
  """Linear map to heads: [B, S, D] -> [B, S, H, K]. No bias."""

  num_heads: int
  head_dim: int
  normalize: bool  # To unit length, unless they are asked for raw.
  dtype: str
  first: Callable = nn.initializers.lecun_normal()  # Of the first weights.

  @nn.compact
  def __call__(self, x_BSD, unnormalized=False):
    shape = x_BSD.shape[-1], self.num_heads * self.head_dim
    kernel_DF = self.param('kernel', self.first, shape)
    y = x_BSD.astype(self.dtype) @ kernel_DF.astype(self.dtype)
    y = y.reshape(*y.shape[:2], self.num_heads, self.head_dim)
    return unit(y) if self.normalize and not unnormalized else y
