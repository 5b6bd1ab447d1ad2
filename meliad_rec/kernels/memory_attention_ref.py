"""Attention to memory slots, in no order: the definition, which XLA runs."""

import jax
import jax.numpy as jnp

from meliad_rec.kernels.window_attention_ref import NEVER
from meliad_rec.kernels.window_attention_ref import of_each_head
from meliad_rec.kernels.window_attention_ref import scaled_unit
from meliad_rec.kernels.window_attention_ref import wide


def memory_attention(
  q_BTHK, k_BSHK, v_BSHK, mask_BS, *, scale_H=None, keep_HTS=None
):
  """Attention of every query over every slot.

  Args:
    q_BTHK: queries.
    k_BSHK: keys of the slots; of fewer heads, if each serves several heads of
      queries.
    v_BSHK: their values.
    mask_BS: bool, False at slots nobody may see.
    scale_H: queries are brought to unit length and multiplied with it; keys
      are no longer than that. None: queries are scaled already.
    keep_HTS: dropout factors of the probabilities, for all rows; or None.

  Returns:
    [B, T, H, K]; zeros where no slot is visible.
  """
  if scale_H is not None:
    q_BTHK = scaled_unit(q_BTHK, scale_H)
  k_BSHK, v_BSHK = (of_each_head(a, q_BTHK.shape[2]) for a in (k_BSHK, v_BSHK))
  logits = jnp.einsum(
    'bthk,bshk->bhts', q_BTHK, k_BSHK, preferred_element_type=wide(q_BTHK)
  )
  seen = mask_BS[:, None, None, :]
  p = jax.nn.softmax(jnp.where(seen, logits, NEVER), -1)
  p = jnp.where(seen, p, 0)
  if keep_HTS is not None:
    p = p * keep_HTS
  return jnp.einsum('bhts,bshk->bthk', p.astype(v_BSHK.dtype), v_BSHK)
