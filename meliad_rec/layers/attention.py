"""Caches of keys and values, projections to heads, and encoder attention.

In an encoder, tokens may attend to all tokens of one call of the layer. Other
layers attend to a window of the last tokens.
"""

from collections.abc import Callable
import functools

from flax import linen as nn
from flax import struct
import jax
from jax.experimental.layout import Layout
from jax.experimental.layout import with_layout_constraint
import jax.numpy as jnp
import numpy as np

from meliad_rec.distributed.per_shard import per_shard
from meliad_rec.kernels.dispatch import mesh_platform
from meliad_rec.kernels.reference import l2_normalize
from meliad_rec.kernels.reference import MASKED
from meliad_rec.kernels.reference import merge_heads
from meliad_rec.kernels.reference import normalize_own_keys
from meliad_rec.layers.linear import dot_general

QUERY_BLOCK = 128  # Queries that `attend` processes at once.


class KV(struct.PyTreeNode):
  """Keys and values, oldest first.

  Attributes:
    k, v: [B, S, H, K]; H is the number of heads of keys and values.
    mask: [B, S] bool, False at keys that no query may see.
    unnormalized: number of newest keys that still lack L2 normalization. Each
      reader must normalize them. Kernels for TPU do so while they read keys,
      which is faster if most keys are read only in one segment.
  """

  k: jax.Array
  v: jax.Array
  mask: jax.Array
  unnormalized: int = struct.field(pytree_node=False, default=0)

  @classmethod
  def empty(cls, batch, length, heads, head_dim, dtype, visible=False):
    """Returns a KV of zeros, whose mask is `visible` everywhere.

    See LayerConfig.compat_meliad.
    """
    zeros = jnp.zeros((batch, length, heads, head_dim), dtype)
    return cls(zeros, zeros, jnp.full((batch, length), visible))

  def append(self, new: 'KV') -> 'KV':
    """Returns the keys and values of `self`, and then of `new`.

    `self.unnormalized` must be 0.
    """
    joined = lambda a, b: jnp.concatenate([a, b], 1)
    return _by_token(joined, self, new.replace(unnormalized=0)).replace(
      unnormalized=new.unnormalized
    )

  def last(self, length: int) -> 'KV':
    """Returns the `length` newest keys and values, with `unnormalized` 0."""
    part = _by_token(lambda a: a[:, a.shape[1] - length :], self)
    if self.mask.shape[1] >= 2 * length:  # All of them are of a new segment.
      part = part.replace(k=_by_rows(part.k), v=_by_rows(part.v))
    return part.replace(
      unnormalized=min(self.unnormalized, length)
    ).normalized()

  def normalized(self) -> 'KV':
    """Returns the KV with `unnormalized` 0, after normalizing those keys."""
    if not self.unnormalized:
      return self
    return self.replace(
      k=normalize_own_keys(self.k, self.unnormalized), unnormalized=0
    )


def _by_token(call: Callable, *kvs: KV) -> KV:
  """Returns a KV whose arrays `call` computes from those of several KVs.

  `call` works along axis 1. It is called three times: with the k of each KV,
  with the v of each, and with the mask of each. In these arrays, heads and head
  width are one axis. On a TPU, a separate axis of heads would change the layout
  of the arrays, and kernels take arrays without one.
  """

  def merged(*arrays):
    heads = arrays[0].shape[2:]
    a = call(*(a.reshape(*a.shape[:2], -1) for a in arrays))
    return a.reshape(*a.shape[:2], *heads)

  return jax.tree.map(merged, *kvs)


def _by_rows(a_BSHK):
  """Asks XLA for TPUs to lay out keys or values with merged heads by rows.

  A cache of keys has a separate axis of heads, so keys by rows must be copied
  to enter it. Without this request, XLA avoids the copy: it computes all keys
  of a segment transposed, and transposes them back for the kernels of
  attention, which takes longer. On other platforms, the array is returned
  unchanged.
  """
  if mesh_platform() != 'tpu':
    return a_BSHK

  def constrain(a_BSHK):
    a_BSF = with_layout_constraint(merge_heads(a_BSHK), Layout((0, 1, 2)))
    return (a_BSF.reshape(a_BSHK.shape),)

  # XLA would gather the rows of all devices, to constrain their layout.
  (a_BSHK,) = per_shard(constrain, ('BTHK',), (a_BSHK,), ('BTHK',))(a_BSHK)
  return a_BSHK


class Heads(nn.Module):
  """Linear map to heads, without bias: [B, S, D] -> [B, S, H, K].

  Attributes:
    num_heads: number of heads H.
    head_dim: width of a head K.
    normalize: whether to L2-normalize the vector of each head. A call that sets
      `unnormalized` does not normalize.
    dtype: dtype of the result.
    kernel_init: initializer of the weights.
  """

  num_heads: int
  head_dim: int
  normalize: bool
  dtype: str
  kernel_init: Callable = nn.initializers.lecun_normal()

  @nn.compact
  def __call__(self, x_BSD, unnormalized=False):
    shape = x_BSD.shape[-1], self.num_heads * self.head_dim
    kernel_DF = self.param('kernel', self.kernel_init, shape)
    y = dot_general(
      x_BSD.astype(self.dtype),
      kernel_DF.astype(self.dtype),
      (((2,), (0,)), ((), ())),
    )
    y = y.reshape(*y.shape[:2], self.num_heads, self.head_dim)
    return l2_normalize(y) if self.normalize and not unnormalized else y


def attend(
  relative: nn.Module | None,
  q_BTHK,
  k_BSHK,
  v_BSHK,
  mask_BS,
  *,
  causal: bool,
  keep=None,
  dropout_rate: float = 0.0,
):
  """Returns the result of attention, [B, T, H, K].

  It is 0 for a query that sees no key. Queries are processed in groups of up to
  QUERY_BLOCK. If `causal`, a group reads no keys after its last query. If there
  are several groups, the backward pass computes probabilities again, so no
  [T, S] array is stored. On a CPU, rows are then also processed one after
  another, so that the probabilities of a group stay in the CPU's cache.

  Args:
    relative: position module of positions.py. Query i and key i have the same
      position. None means that queries and keys have no positions, and that
      `causal` has no effect.
    q_BTHK: queries, already scaled.
    k_BSHK, v_BSHK: keys and values.
    mask_BS: bool, True at keys that may be seen.
    causal: whether a query sees only keys at its own and earlier positions.
    keep: bool, True at probabilities that dropout keeps: [H, T, S], or
      [B, H, T, S] if each row has its own mask. None keeps all.
    dropout_rate: probability with which `keep` is False.
  """
  pairs = rotated_pairs(relative, q_BTHK, k_BSHK, causal)
  causal = relative is not None and causal
  call = functools.partial(_attend_on_device, causal, dropout_rate)
  arguments = mask_BS, keep, v_BSHK, *sum(pairs, ())
  # Without per_shard, XLA may shard rows and queries over the axis of heads.
  kind = 'BH' if _has_rows(keep) else 'H'
  kinds = 'BS', kind, *['BTHK'] * (1 + 2 * len(pairs))
  (y_BTHK,) = per_shard(call, kinds, arguments, ('BTHK',))(*arguments)
  return y_BTHK


def attention_weights(
  relative: nn.Module | None, q_BTHK, k_BSHK, mask_BS, causal: bool
):
  """Returns the weights of attention, for pictures.

  With `relative`, the result is [B, T, H, T], and the last axis is the distance
  back from the query; this needs a causal layer. Without it, the result is
  [B, T, H, S].

  Args:
    relative, q_BTHK, k_BSHK, mask_BS, causal: as in `attend`.
  """
  T, S = q_BTHK.shape[1], k_BSHK.shape[1]
  pairs = rotated_pairs(relative, q_BTHK, k_BSHK, causal)
  pairs = [tuple(a.swapaxes(1, 2) for a in pair) for pair in pairs]
  back_TS = np.arange(T)[:, None] - np.arange(S)
  seen = mask_BS[:, None, None]
  if relative is not None and causal:
    seen = seen & (back_TS >= 0)
  logits_BHTS = jnp.where(seen, attention_logits(pairs, back_TS < 0), MASKED)
  p_BTHS = jnp.where(seen, jax.nn.softmax(logits_BHTS), 0).swapaxes(1, 2)
  if relative is None:
    return p_BTHS
  at = np.maximum(back_TS, 0)[None, :, None]
  p_BTHS = jnp.take_along_axis(p_BTHS, at, 3)
  return jnp.where(back_TS[:, None] >= 0, p_BTHS, 0)


def rotated_pairs(relative: nn.Module | None, q_BTHK, k_BSHK, causal: bool):
  """Returns a list of one or two pairs (queries, keys) for `attention_logits`.

  Queries and keys are rotated by their positions, unless `relative` is None.
  The list has a second pair only if `relative` is two-sided and `causal` is
  False. It is for logits where the key is later than the query.
  """
  if relative is None:
    return [(q_BTHK, k_BSHK)]
  rotate, rotate_keys = relative.rotate, relative.rotate_keys
  # Only distances matter. Positions counted from the middle keep decays closest
  # to 1.
  first = -(q_BTHK.shape[1] // 2)
  pairs = [(rotate(q_BTHK, first), rotate_keys(k_BSHK, first))]
  if relative.two_sided and not causal:
    pairs.append((rotate_keys(q_BTHK, first), rotate(k_BSHK, first)))
  return pairs


def attention_logits(pairs, later_QS):
  """Returns the logits of Q queries and S keys, [..., H, Q, S] float32.

  Args:
    pairs: a list of one or two (queries [..., H, Q, K], keys [..., H, S, K]).
      If there are two, the second gives the logits where `later_QS` is True.
    later_QS: bool, True where the key is later than the query.
  """
  products = [
    jnp.einsum(
      '...qk,...sk->...qs', q_HQK, k_HSK, preferred_element_type=jnp.float32
    )
    for q_HQK, k_HSK in pairs
  ]
  if len(products) == 1:
    return products[0]
  return jnp.where(later_QS, products[1], products[0])


def _has_rows(keep):
  return keep is not None and keep.ndim == 4


def _attend_on_device(
  causal: bool, rate: float, mask_BS, keep, v_BSHK, *pairs_BTHK
):
  """Computes `attend` for the rows and heads of one device.

  Args:
    causal, mask_BS, keep, v_BSHK: as in `attend`.
    rate: dropout_rate of `attend`.
    *pairs_BTHK: the pairs of `rotated_pairs`, flattened: queries, keys, and
      the queries and keys of the second pair, if there is one.

  Returns:
    A tuple of one array, the result [B, T, H, K].
  """
  heads_first = lambda a_BSHK: a_BSHK.swapaxes(1, 2)
  v_BHSK, *pairs_BHTK = map(heads_first, (v_BSHK, *pairs_BTHK))
  pairs = list(zip(pairs_BHTK[::2], pairs_BHTK[1::2], strict=True))
  row_keep, shared_keep = (keep, None) if _has_rows(keep) else (None, keep)
  rows = (pairs, v_BHSK), mask_BS, row_keep
  read = functools.partial(_attend_by_blocks, causal, rate)

  def row_by_row(rows, shared_keep):
    one_row = lambda row: read(row, shared_keep)
    return jax.lax.map(jax.checkpoint(one_row), rows)

  if pairs[0][0].shape[2] <= QUERY_BLOCK:
    return (heads_first(read(rows, shared_keep)),)
  y_BHTK = jax.lax.platform_dependent(
    rows, shared_keep, cpu=row_by_row, default=read
  )
  return (heads_first(y_BHTK),)


def _attend_by_blocks(causal: bool, rate: float, rows, shared_keep_HTS):
  """Returns the result of attention, [..., H, T, K].

  In all shapes, `...` is the axis of rows, or nothing if there is
  only a single row without that axis.

  Args:
    causal: as in `attend`.
    rate: dropout_rate of `attend`.
    rows: ((pairs, values), mask, keep). `pairs` are those of
      `attention_logits`, with T queries; values are [..., H, S, K]; the mask of
      keys is [..., S]; and `keep` is [..., H, T, S] if each row has its own,
      else None.
    shared_keep_HTS: `keep` if all rows share one, else None.
  """
  (pairs, v_HSK), _, _ = rows
  T, S = pairs[0][0].shape[-2], v_HSK.shape[-2]

  def block(start, rows, shared_keep_HTS):
    (pairs, v_HSK), mask_S, keep_HTS = rows
    keep_HTS = shared_keep_HTS if keep_HTS is None else keep_HTS
    stop = min(start + QUERY_BLOCK, T)
    end = stop if causal else S
    pairs = [(q[..., start:stop, :], k[..., :end, :]) for q, k in pairs]
    later_QS = np.arange(start, stop)[:, None] < np.arange(end)
    seen_1QS = mask_S[..., None, None, :end]
    if causal:
      seen_1QS = seen_1QS & ~later_QS
    logits_HQS = jnp.where(seen_1QS, attention_logits(pairs, later_QS), MASKED)
    # The floor keeps the exponentials of a query without keys at 0.
    top_HQ1 = jnp.maximum(jnp.max(logits_HQS, -1, keepdims=True), MASKED / 2)
    p_HQS = jnp.exp(logits_HQS - jax.lax.stop_gradient(top_HQ1))
    total_HQ1 = jnp.sum(p_HQS, -1, keepdims=True)
    total_HQ1 = jnp.where(total_HQ1 > 0, total_HQ1, 1)
    if keep_HTS is not None:
      p_HQS = p_HQS * (keep_HTS[..., start:stop, :end] / (1 - rate))
    v_HSK = v_HSK[..., :end, :]
    y_HQK = jnp.einsum('...qs,...sk->...qk', p_HQS.astype(v_HSK.dtype), v_HSK)
    return (y_HQK / total_HQ1).astype(v_HSK.dtype)

  if T <= QUERY_BLOCK:
    return block(0, rows, shared_keep_HTS)
  again = jax.checkpoint(block, static_argnums=0)
  blocks = [
    again(start, rows, shared_keep_HTS) for start in range(0, T, QUERY_BLOCK)
  ]
  return jnp.concatenate(blocks, -2)
