"""Causal sliding-window attention: the definition, T x S, slow and obvious.

Of arrays in float64 all of it is float64.

Attention to memory slots, in no order: the definition, which XLA runs.
"""

import jax
import jax.numpy as jnp

NEVER = -1e30  # A logit whose exponential is exactly 0 in float32.


def window_attention(
  q_BTHK,
  k_BSHK,
  v_BSHK,
  mask_BS,
  bias_HW,
  *,
  scale_H=None,
  keys_WK=None,
  include_self=False,
  normalize_own=False,
):
  """Attention of T queries over the window of keys before each of them.

  Query t stands at key P + t: the first P keys are the past, P at most W. It
  sees the W nearest keys: those 1 to W steps back, or 0 to W - 1 if it sees
  itself.

  Args:
    q_BTHK: queries.
    k_BSHK: keys, P of the past and then the T of the queries' own tokens; of
      fewer heads, if each serves several heads of queries.
    v_BSHK: values.
    mask_BS: bool, False at keys nobody may see.
    bias_HW: added to the logits; W counts steps back among the visible keys.
      NEVER hides a key.
    scale_H: queries are brought to unit length and multiplied with it; keys
      are no longer than that. None: queries are scaled already.
    keys_WK: added to the keys, by steps back, for all heads; None: nothing.
    include_self: whether the nearest visible key is the query's own.
    normalize_own: whether the T own keys are brought to unit length too.

  Returns:
    [B, T, H, K]; zeros for a query that sees no key.
  """
  T, S, W = q_BTHK.shape[1], k_BSHK.shape[1], bias_HW.shape[1]
  if normalize_own:
    k_BSHK = normalize_own_keys(k_BSHK, T)
  if scale_H is not None:
    q_BTHK = scaled_unit(q_BTHK, scale_H)
  k_BSHK, v_BSHK = (of_each_head(a, q_BTHK.shape[2]) for a in (k_BSHK, v_BSHK))
  back_TS = jnp.arange(T)[:, None] + S - T - jnp.arange(S)[None]
  back_TS = back_TS - (0 if include_self else 1)
  near_TS = (back_TS >= 0) & (back_TS < W)
  logits_BHTS = jnp.einsum(
    'bthk,bshk->bhts', q_BTHK, k_BSHK, preferred_element_type=wide(q_BTHK)
  )
  back_TS = jnp.clip(back_TS, 0, W - 1)
  if keys_WK is not None:
    logits_BHTS += jnp.einsum(
      'bthk,tsk->bhts',
      q_BTHK,
      keys_WK.astype(q_BTHK.dtype)[back_TS],
      preferred_element_type=wide(q_BTHK),
    )
  bias_HTS = bias_HW[:, back_TS]
  logits_BHTS += bias_HTS
  seen_BHTS = near_TS & mask_BS[:, None, None, :] & (bias_HTS > NEVER / 2)
  p_BHTS = jax.nn.softmax(jnp.where(seen_BHTS, logits_BHTS, NEVER), -1)
  p_BHTS = jnp.where(seen_BHTS, p_BHTS, 0).astype(v_BSHK.dtype)
  return jnp.einsum('bhts,bshk->bthk', p_BHTS, v_BSHK)


def of_each_head(a_BSHK, heads: int):
  """Keys or values as each head of queries sees them; see LayerConfig."""
  sharing = heads // a_BSHK.shape[2]
  return a_BSHK if sharing == 1 else jnp.repeat(a_BSHK, sharing, 2)


def wide(a):
  """The dtype that sums of an array are in: float32, or its own if wider."""
  return jnp.promote_types(a.dtype, jnp.float32)


def unit(x_BSHK):
  """Of unit length, in the dtype given."""
  x = x_BSHK.astype(wide(x_BSHK))
  factor = jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)
  return (x * factor).astype(x_BSHK.dtype)


def normalize_own_keys(k_BSHK, T: int):
  """Keys, the last T of them of unit length now."""
  past = k_BSHK.shape[1] - T
  return jnp.concatenate([k_BSHK[:, :past], unit(k_BSHK[:, past:])], 1)


def scaled_unit(q_BTHK, scale_H):
  """Queries of unit length, times the scale of their head."""
  return (unit(q_BTHK) * scale_H[:, None]).astype(q_BTHK.dtype)


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
