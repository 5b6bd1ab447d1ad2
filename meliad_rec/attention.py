"""Keys and values, queries, and attention over memory slots."""

from collections.abc import Callable

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.kernels.window_attention_ref import NEVER
from meliad_rec.kernels.window_attention_ref import of_each_head
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


def attend(q_BTHK, kv: KV, keep_HTS=None):
  """Attention of every query over every slot, in no order.

  Args:
    q_BTHK: queries, scaled.
    kv: the slots.
    keep_HTS: dropout factors of the probabilities, for all rows; or None.

  Returns:
    [B, T, H, K]; zeros where no slot is visible.
  """
  k_BSHK, v_BSHK = (of_each_head(a, q_BTHK.shape[2]) for a in (kv.k, kv.v))
  logits = jnp.einsum(
    'bthk,bshk->bhts', q_BTHK, k_BSHK, preferred_element_type=jnp.float32
  )
  seen = kv.mask[:, None, None, :]
  p = jax.nn.softmax(jnp.where(seen, logits, NEVER), -1)
  p = jnp.where(seen, p, 0)
  if keep_HTS is not None:
    p = p * keep_HTS
  return jnp.einsum('bhts,bshk->bthk', p.astype(v_BSHK.dtype), v_BSHK)
