"""Reference implementations of attention in plain XLA, and attention's inputs.

The reference implementations compute the logits of all T queries with all S
keys at once. Tests compare the other implementations with them; pictures show
their weights. Arrays in float64 give float64 results.
"""

from flax import struct
import jax
import jax.numpy as jnp

MASKED = -1e30  # Finite score of a masked key; its exponential is exactly 0.


class AttentionInputs(struct.PyTreeNode):
  """Inputs of causal sliding-window attention, for all its implementations.

  There are T queries, P + T keys and a window of W keys. The first P keys,
  P <= W, are past keys. The other T are own keys: they belong to the same
  tokens as the queries, so query t has the position of key P + t. A query sees
  the W nearest keys: those 1 to W tokens back, or 0 to W - 1 tokens back if
  `include_self` is True.

  Attributes:
    q_BTHK: queries.
    k_BSHK: keys, S = P + T of them. They may have fewer heads, each shared by
      several heads of queries.
    v_BSHK: values, with as many heads as the keys.
    mask_BS: bool, False at keys that no query may see.
    bias_HW: added to the logits, by distance: index 0 is for the nearest
      visible key. A bias of MASKED hides the keys at that distance.
    scale_H: scale of each head, by which the queries are multiplied after
      L2-normalization. The keys must then have unit length too, except own keys
      that `normalize_own` normalizes. None means that the queries are already
      scaled.
    keys_WK: vectors added to the keys of all heads, by distance as in bias_HW;
      None adds nothing.
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

    keys_WK has no kind, because only kernels run under per_shard, and they do
    not support keys_WK.
    """
    return self.replace(
      q_BTHK='BTHK',
      k_BSHK='BTHK',
      v_BSHK='BTHK',
      mask_BS='BS',
      bias_HW='H',
      scale_H='H',
      keys_WK=None,
    )


def window_attention(inputs: AttentionInputs):
  """Returns outputs [B, T, H, K], which are 0 for a query that sees no key."""
  (v_BSHK,) = repeat_kv_heads(inputs.q_BTHK.shape[2], inputs.v_BSHK)
  p_BHTS, _ = _window_weights(inputs)
  return jnp.einsum('bhts,bshk->bthk', p_BHTS.astype(v_BSHK.dtype), v_BSHK)


def window_weights(inputs: AttentionInputs):
  """Returns the weights of keys by distance, [B, T, H, W].

  Index 0 of the last axis is the nearest visible key. Weights are 0 where there
  is no key, and add up to 1 or, for a query that sees no key, to 0.
  """
  p_BHTS, back_TS = _window_weights(inputs)
  T, S = back_TS.shape
  key_TW = back_TS[:, :1] - jnp.arange(inputs.window)
  p_BHTW = jnp.take_along_axis(
    p_BHTS, jnp.clip(key_TW, 0, S - 1)[None, None], 3
  )
  return jnp.where(key_TW >= 0, p_BHTW, 0).swapaxes(1, 2)


def _window_weights(inputs: AttentionInputs):
  """Returns weights p_BHTS, and back_TS, the distances of keys.

  The distance is 0 at the nearest visible key, and negative at later ones.
  """
  q_BTHK, k_BSHK, bias_HW = inputs.q_BTHK, inputs.k_BSHK, inputs.bias_HW
  T, S, W = q_BTHK.shape[1], k_BSHK.shape[1], inputs.window
  if inputs.normalize_own:
    k_BSHK = normalize_own_keys(k_BSHK, T)
  if inputs.scale_H is not None:
    q_BTHK = normalize_and_scale(q_BTHK, inputs.scale_H)
  (k_BSHK,) = repeat_kv_heads(q_BTHK.shape[2], k_BSHK)
  back_TS = jnp.arange(T)[:, None] + S - T - jnp.arange(S)[None]
  back_TS = back_TS - (0 if inputs.include_self else 1)
  near_TS = (back_TS >= 0) & (back_TS < W)
  logits_BHTS = jnp.einsum(
    'bthk,bshk->bhts', q_BTHK, k_BSHK, preferred_element_type=sum_dtype(q_BTHK)
  )
  bias_TS = jnp.clip(back_TS, 0, W - 1)
  if inputs.keys_WK is not None:
    logits_BHTS += jnp.einsum(
      'bthk,tsk->bhts',
      q_BTHK,
      inputs.keys_WK.astype(q_BTHK.dtype)[bias_TS],
      preferred_element_type=sum_dtype(q_BTHK),
    )
  bias_HTS = bias_HW[:, bias_TS]
  logits_BHTS += bias_HTS
  seen_BHTS = (
    near_TS & inputs.mask_BS[:, None, None, :] & (bias_HTS > MASKED / 2)
  )
  p_BHTS = jax.nn.softmax(jnp.where(seen_BHTS, logits_BHTS, MASKED), -1)
  return jnp.where(seen_BHTS, p_BHTS, 0), back_TS


class MemoryInputs(struct.PyTreeNode):
  """Inputs of attention to memory slots, which have no order.

  Attributes:
    q_BTHK: queries.
    k_BSHK: keys of the slots; they may have fewer heads, as in AttentionInputs.
    v_BSHK: values of the slots, with as many heads as the keys.
    mask_BS: bool, False at slots that no query may see. Each query sees all
      other slots of its row.
    scale_H: see AttentionInputs; the keys must have unit length if it is given.
  """

  q_BTHK: jax.Array
  k_BSHK: jax.Array
  v_BSHK: jax.Array
  mask_BS: jax.Array
  scale_H: jax.Array | None = None

  def kinds(self) -> 'MemoryInputs':
    """Returns the kind of each array, as per_shard.per_shard needs it."""
    return MemoryInputs('BTHK', 'BTHK', 'BTHK', 'BS', 'H')


def memory_attention(inputs: MemoryInputs, keep_HTS=None):
  """Returns outputs [B, T, H, K], which are 0 in a row without visible slots.

  Args:
    inputs: see MemoryInputs.
    keep_HTS: dropout factors of the probabilities, 0 or 1 / (1 - rate), the
      same for all rows; None means that all are 1.
  """
  p = memory_weights(inputs).swapaxes(1, 2)
  if keep_HTS is not None:
    p = p * keep_HTS
  (v_BSHK,) = repeat_kv_heads(inputs.q_BTHK.shape[2], inputs.v_BSHK)
  return jnp.einsum('bhts,bshk->bthk', p.astype(v_BSHK.dtype), v_BSHK)


def memory_weights(inputs: MemoryInputs):
  """Returns the weights of slots, [B, T, H, S]; 0 at slots that are hidden."""
  q_BTHK = inputs.q_BTHK
  if inputs.scale_H is not None:
    q_BTHK = normalize_and_scale(q_BTHK, inputs.scale_H)
  (k_BSHK,) = repeat_kv_heads(q_BTHK.shape[2], inputs.k_BSHK)
  logits = jnp.einsum(
    'bthk,bshk->bhts', q_BTHK, k_BSHK, preferred_element_type=sum_dtype(q_BTHK)
  )
  seen = inputs.mask_BS[:, None, None, :]
  p = jax.nn.softmax(jnp.where(seen, logits, MASKED), -1)
  return jnp.where(seen, p, 0).swapaxes(1, 2)


def l2_normalize(x_BSHK):
  """Scales the vectors along the last axis to unit length; keeps the dtype."""
  x = x_BSHK.astype(sum_dtype(x_BSHK))
  factor = jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)
  return (x * factor).astype(x_BSHK.dtype)


def normalize_own_keys(k_BSHK, T: int):
  """L2-normalizes the last T keys, and leaves earlier keys unchanged."""
  past = k_BSHK.shape[1] - T
  return jnp.concatenate([k_BSHK[:, :past], l2_normalize(k_BSHK[:, past:])], 1)


def normalize_and_scale(q_BTHK, scale_H):
  """L2-normalizes queries and multiplies them by the scale of their head."""
  return (l2_normalize(q_BTHK) * scale_H[:, None]).astype(q_BTHK.dtype)


def repeat_kv_heads(num_heads: int, *arrays_BSHK):
  """Returns the arrays as a list, with each array's heads repeated.

  Args:
    num_heads: number of query heads, and of heads of the results.
    *arrays_BSHK: keys or values, all with the same number of heads.
  """
  shared = num_heads // arrays_BSHK[0].shape[2]
  return [a if shared == 1 else jnp.repeat(a, shared, 2) for a in arrays_BSHK]


def merge_heads(a_BSHK):
  """Reshapes [B, S, H, K] to [B, S, H K]."""
  return a_BSHK.reshape(*a_BSHK.shape[:2], -1)


def sum_dtype(a):
  """Returns the dtype for sums of an array: its own, but at least float32."""
  return jnp.promote_types(a.dtype, jnp.float32)
