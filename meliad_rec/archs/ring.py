"""A ring of keys and values that is too large to copy.

A segment is written over what is too old for it, and is read behind that, so
that no old version of the ring is needed: not by a later block, nor by the
backward pass.
"""

import jax
import jax.numpy as jnp

from meliad_rec.attention import KV
from meliad_rec.reset import Resettable


class Ring(Resettable):
  """The last S keys and values; the next are written over the oldest."""

  keys: jax.Array  # [B, H, S, K]: heads first, as they are multiplied.
  values: jax.Array  # [B, H, S, K]
  mask: jax.Array  # [B, 1, S, 1] bool, False at keys nobody may see.
  next_B: jax.Array  # int32: place of the next; the same in every row.

  @classmethod
  def empty(cls, batch, length, heads, head_width, dtype) -> 'Ring':
    zeros = jnp.zeros((batch, heads, length, head_width), dtype)
    mask = jnp.zeros((batch, 1, length, 1), bool)
    return cls(zeros, zeros, mask, jnp.zeros(batch, jnp.int32))

  def reset(self, start_B, fresh):
    # Rows keep their common place: where a row lies in the ring never matters.
    return self.hide(start_B)

  def hide(self, rows_B) -> 'Ring':
    """The ring, of which nothing is seen in these rows."""
    rows = rows_B.reshape(-1, *[1] * (self.mask.ndim - 1))
    return self.replace(mask=self.mask & ~rows)

  def write(self, new: KV, block: int) -> 'Ring':
    """The ring behind T tokens: whole blocks, or one token."""
    T, S = new.mask.shape[1], self.mask.shape[2]
    W = min(T, block)
    first = self.next_B[0] // W
    new = new.k.swapaxes(1, 2), new.v.swapaxes(1, 2), new.mask[:, None, :, None]
    cut = jax.lax.dynamic_slice_in_dim
    put = jax.lax.dynamic_update_slice_in_dim

    def write_block(i, slots):
      one = lambda a, b: put(a, cut(b, (i - first) * W, W, 2), i * W % S, 2)
      return jax.tree.map(one, slots, new)

    # Bounds that XLA does not know keep it from unrolling a loop of one block:
    # fused with each of its readers, that would copy the ring for each.
    slots = jax.lax.fori_loop(
      first, first + T // W, write_block, (self.keys, self.values, self.mask)
    )
    return Ring(*slots, (self.next_B + T) % S)

  def age_S(self):
    """By place, how many tokens were written behind it."""
    S = self.mask.shape[2]
    return (self.next_B[0] - 1 - jnp.arange(S)) % S
