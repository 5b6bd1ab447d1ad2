"""Attention as defined, with all T x S logits in plain XLA, and its inputs.

For windowed attention this is only the reference with which tests compare the
other implementations. Attention to memory slots runs as defined here wherever
no kernel supports it. Arrays in float64 give float64 results.
"""

from flax import struct
import jax
import jax.numpy as jnp

NEVER = -1e30  # A logit whose exponential is exactly 0 in float32.


class AttentionInputs(struct.PyTreeNode):
  """Inputs of causal sliding-window attention, in all its implementations.

  The first P keys are the past, P <= W; the other T are own keys, those of the
  queries' own tokens: query t is at key P + t. It sees the W nearest keys: 1 to
  W steps back, or 0 to W - 1 if it sees itself.

  Attributes:
    q_BTHK: queries.
    k_BSHK: keys, S = P + T of them. They may have fewer heads, each shared by
      several heads of queries.
    v_BSHK: values.
    mask_BS: bool, False at keys that no query may see.
    bias_HW: added to the logits, by distance: index 0 is for the nearest
      visible key. NEVER hides a key.
    scale_H: per-head scale applied after L2-normalizing the queries; keys are
      normalized too. None: the queries are already scaled.
    keys_WK: added to the keys of all heads, by distance as bias_HW; None adds
      nothing.
    include_self: whether the nearest visible key is the query's own.
    normalize_own: whether to L2-normalize the T own keys.
  """

  q_BTHK: jax.Array
  k_BSHK: jax.Array
  v_BSHK: jax.Array
  mask_BS: jax.Array
  bias_HW: jax.Array
  scale_H: jax.Array | None = None
  keys_WK: jax.Array | None = None
  include_self: bool = struct.field(pytree_node=False, default=False)
  normalize_own: bool = struct.field(pytree_node=False, default=False)

  @property
  def window(self) -> int:
    return self.bias_HW.shape[1]

  def kinds(self) -> 'AttentionInputs':
    """Returns the kind of each array, as per_shard.per_shard needs it.

    Only kernels run per shard, and they take no keys_WK.
    """
    return self.replace(
      q_BTHK='tokens',
      k_BSHK='tokens',
      v_BSHK='tokens',
      mask_BS='rows',
      bias_HW='heads',
      scale_H='heads',
      keys_WK=None,
    )


def window_attention(inputs: AttentionInputs):
  """Returns attention [B, T, H, K]; zeros for a query that sees no key."""
  q_BTHK, k_BSHK, bias_HW = inputs.q_BTHK, inputs.k_BSHK, inputs.bias_HW
  T, S, W = q_BTHK.shape[1], k_BSHK.shape[1], inputs.window
  if inputs.normalize_own:
    k_BSHK = normalize_own_keys(k_BSHK, T)
  if inputs.scale_H is not None:
    q_BTHK = normalize_and_scale(q_BTHK, inputs.scale_H)
  k_BSHK, v_BSHK = repeat_kv_heads(q_BTHK.shape[2], k_BSHK, inputs.v_BSHK)
  back_TS = jnp.arange(T)[:, None] + S - T - jnp.arange(S)[None]
  back_TS = back_TS - (0 if inputs.include_self else 1)
  near_TS = (back_TS >= 0) & (back_TS < W)
  logits_BHTS = jnp.einsum(
    'bthk,bshk->bhts', q_BTHK, k_BSHK, preferred_element_type=sum_dtype(q_BTHK)
  )
  back_TS = jnp.clip(back_TS, 0, W - 1)
  if inputs.keys_WK is not None:
    logits_BHTS += jnp.einsum(
      'bthk,tsk->bhts',
      q_BTHK,
      inputs.keys_WK.astype(q_BTHK.dtype)[back_TS],
      preferred_element_type=sum_dtype(q_BTHK),
    )
  bias_HTS = bias_HW[:, back_TS]
  logits_BHTS += bias_HTS
  seen_BHTS = (
    near_TS & inputs.mask_BS[:, None, None, :] & (bias_HTS > NEVER / 2)
  )
  p_BHTS = jax.nn.softmax(jnp.where(seen_BHTS, logits_BHTS, NEVER), -1)
  p_BHTS = jnp.where(seen_BHTS, p_BHTS, 0).astype(v_BSHK.dtype)
  return jnp.einsum('bhts,bshk->bthk', p_BHTS, v_BSHK)


class MemoryInputs(struct.PyTreeNode):
  """Inputs of attention to memory slots, which have no order.

  Attributes:
    q_BTHK: queries; each sees all slots.
    k_BSHK: keys of the slots; they may have fewer heads, as in AttentionInputs.
    v_BSHK: values of the slots.
    mask_BS: bool, False at slots that no query may see.
    scale_H: see AttentionInputs.
  """

  q_BTHK: jax.Array
  k_BSHK: jax.Array
  v_BSHK: jax.Array
  mask_BS: jax.Array
  scale_H: jax.Array | None = None

  def kinds(self) -> 'MemoryInputs':
    """Returns the kind of each array, as per_shard.per_shard needs it."""
    return MemoryInputs('tokens', 'tokens', 'tokens', 'rows', 'heads')


def memory_attention(inputs: MemoryInputs, keep_HTS=None):
  """Returns attention [B, T, H, K]; zeros where no slot is visible.

  Args:
    inputs: see MemoryInputs.
    keep_HTS: dropout factors of the probabilities, 0 or 1 / (1 - rate), the
      same for all rows; None: all are 1.
  """
  q_BTHK = inputs.q_BTHK
  if inputs.scale_H is not None:
    q_BTHK = normalize_and_scale(q_BTHK, inputs.scale_H)
  k_BSHK, v_BSHK = repeat_kv_heads(
    q_BTHK.shape[2], inputs.k_BSHK, inputs.v_BSHK
  )
  logits = jnp.einsum(
    'bthk,bshk->bhts', q_BTHK, k_BSHK, preferred_element_type=sum_dtype(q_BTHK)
  )
  seen = inputs.mask_BS[:, None, None, :]
  p = jax.nn.softmax(jnp.where(seen, logits, NEVER), -1)
  p = jnp.where(seen, p, 0)
  if keep_HTS is not None:
    p = p * keep_HTS
  return jnp.einsum('bhts,bshk->bthk', p.astype(v_BSHK.dtype), v_BSHK)


def l2_normalize(x_BSHK):
  """Returns vectors of unit length, in the dtype given."""
  x = x_BSHK.astype(sum_dtype(x_BSHK))
  factor = jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)
  return (x * factor).astype(x_BSHK.dtype)


def normalize_own_keys(k_BSHK, T: int):
  """L2-normalizes the last T keys."""
  past = k_BSHK.shape[1] - T
  return jnp.concatenate([k_BSHK[:, :past], l2_normalize(k_BSHK[:, past:])], 1)


def normalize_and_scale(q_BTHK, scale_H):
  """L2-normalizes queries and multiplies them by the scale of their head."""
  return (l2_normalize(q_BTHK) * scale_H[:, None]).astype(q_BTHK.dtype)


def repeat_kv_heads(num_heads: int, *arrays_BSHK):
  """Repeats shared heads of keys and values, up to one for each query head."""
  shared = num_heads // arrays_BSHK[0].shape[2]
  return [a if shared == 1 else jnp.repeat(a, shared, 2) for a in arrays_BSHK]


def sum_dtype(a):
  """Returns the dtype for sums of an array: float32, or its own if wider."""
  return jnp.promote_types(a.dtype, jnp.float32)
