"""Attention in plain XLA: outputs, and gradients that store no probabilities.

Attention with a window of W keys is a scan over sub-blocks of Q queries. The
queries of a sub-block see keys in one contiguous slice of X = W + Q keys. A
query is thus multiplied with W + Q keys; in a block of W queries it would be
2 W. Bias and band (see kernels/blocks.py) depend on distance only, so one
[Q, X] tile per head serves every sub-block. Vectors that are added to keys by
distance are multiplied with the queries of each sub-block, and the products are
skewed (see `skew`).

Backward passes compute the logits again. The logits and the stored logarithms
of sums of exponentials give the probabilities. So nothing of size T x W is ever
stored, and maxima, sums and quotients are not differentiated (Dao et al. 2022,
section 3.1).

Arrays have heads before tokens, [B, H, T, K], inside the functions of this
file.
"""

from collections.abc import Callable
import dataclasses
import functools

import jax
import jax.numpy as jnp

from meliad_rec.kernels.blocks import Dropout
from meliad_rec.kernels.reference import AttentionInputs
from meliad_rec.kernels.reference import MASKED
from meliad_rec.kernels.reference import MemoryInputs
from meliad_rec.kernels.reference import normalize_and_scale
from meliad_rec.kernels.reference import normalize_own_keys
from meliad_rec.kernels.reference import repeat_kv_heads
from meliad_rec.kernels.reference import sum_dtype


def window_attend(
  inputs: AttentionInputs, dropout: Dropout | None, tile: int | None = None
):
  """Returns outputs, and logarithms of each query's sum of exponentials.

  Args:
    inputs: see AttentionInputs.
    dropout: dropout of the probabilities; None means no dropout. One mask
      [H, Q, X] for the Q queries of a sub-block and the X keys that they see
      serves all rows and sub-blocks, as in google-research/meliad. With
      `dropout.first`, each query has its own mask [H, W] for the keys of its
      window, farthest first, which serves all rows.
    tile: number of queries in a sub-block; None means default_tile(W), for a
      window of W keys. If there are fewer than W past keys, `tile` is ignored,
      and one sub-block takes all queries.

  Returns:
    Outputs [B, T, H, K], zeros for a query that sees no key; and natural
    logarithms [B, H, T] float32.
  """
  bands = _Bands.of(inputs, tile)
  q, k, v, bias_HQX, keys_WK = bands.arrays(inputs)
  mask_BS, keep = bands.mask(inputs), bands.keep_masks(dropout, bias_HQX)

  def sub_block(j):
    k_BHXK, mask_BX = bands.keys(j, k, 2), bands.keys(j, mask_BS, 1)
    logits = bands.logits(
      bands.queries(j, q), k_BHXK, bias_HQX, keys_WK, mask_BX
    )
    return _attend(logits, bands.keys(j, v, 2), keep(j))

  if bands.count == 1:
    o, lse = sub_block(0)
  else:
    step = lambda _, j: (None, sub_block(j))
    _, stacked = jax.lax.scan(step, None, jnp.arange(bands.count))
    o, lse = map(bands.join, stacked)
  return o[:, :, : bands.T].swapaxes(1, 2), lse[:, :, : bands.T]


def window_gradients(
  inputs: AttentionInputs,
  dropout: Dropout | None,
  o_BTHK,
  lse_BHT,
  do_BTHK,
  tile: int | None = None,
) -> AttentionInputs:
  """Returns the gradient of each input, None for the mask.

  Args:
    inputs, dropout, tile: see window_attend.
    o_BTHK, lse_BHT: results of window_attend.
    do_BTHK: gradients of the outputs.
  """
  bands = _Bands.of(inputs, tile)
  arrays, to_inputs = jax.vjp(bands.arrays, inputs.replace(mask_BS=None))
  q, k, v, bias_HQX, keys_WK = arrays
  mask_BS, keep = bands.mask(inputs), bands.keep_masks(dropout, bias_HQX)
  # Each row has its own gradient of the bias until the end: on a CPU, to add
  # them up in each sub-block takes longer than a matrix product does.
  bias_BHQX = jnp.broadcast_to(bias_HQX, (len(q), *bias_HQX.shape))
  do, delta_BHT = bands.pad(_heads_first(do_BTHK)), _delta(o_BTHK, do_BTHK)
  # Padded queries have probabilities of 0.
  pads = (0, 0), (0, 0), (0, bands.count * bands.Q - bands.T)
  lse_BHT = jnp.pad(lse_BHT, pads, constant_values=-MASKED)
  delta_BHT = jnp.pad(delta_BHT, pads)

  def sub_block(sums, j):
    dk, dv, *dshared = sums
    mask_BX, v_BHXK = bands.keys(j, mask_BS, 1), bands.keys(j, v, 2)
    logits, to_operands = jax.vjp(
      functools.partial(bands.logits, mask_BX=mask_BX),
      bands.queries(j, q),
      bands.keys(j, k, 2),
      bias_BHQX,
      keys_WK,
    )
    dlogits, dv_BHXK = _gradients(
      logits,
      v_BHXK,
      keep(j),
      bands.queries(j, lse_BHT),
      bands.queries(j, delta_BHT),
      bands.queries(j, do),
    )
    dq, dk_BHXK, *more = to_operands(dlogits)
    dshared = jax.tree.map(jnp.add, dshared, more)
    return (bands.add(j, dk, dk_BHXK), bands.add(j, dv, dv_BHXK), *dshared), dq

  zeros = lambda a: jnp.zeros(a.shape, sum_dtype(a))
  sums = jax.tree.map(zeros, (k, v, bias_BHQX, keys_WK))
  if bands.count == 1:
    sums, dq = sub_block(sums, 0)
  else:
    sums, stacked = jax.lax.scan(sub_block, sums, jnp.arange(bands.count))
    dq = bands.join(stacked)
  dk, dv, dbias_BHQX, dkeys_WK = sums
  gradients = dq, dk, dv, dbias_BHQX.sum(0), dkeys_WK
  cast = lambda gradient, a: gradient.astype(a.dtype)
  gradients = jax.tree.map(cast, gradients, arrays)
  return to_inputs(gradients)[0]


@dataclasses.dataclass(frozen=True)
class _Bands:
  """Sub-blocks of windowed attention.

  Attributes:
    T: number of queries.
    W: number of keys in the window.
    Q: number of queries in a sub-block.
    missing: how many of the W past keys are not given.
    first: index of the oldest key that the first query sees; 0 is the first of
      W past keys, given or not.
    single: whether there is only one query, and it sees at least one key. The
      keys that it sees are then one slice, so that no band is needed.
  """

  T: int
  W: int
  Q: int
  missing: int
  first: int
  single: bool

  @classmethod
  def of(cls, inputs: AttentionInputs, tile: int | None) -> '_Bands':
    T, W = inputs.q_BTHK.shape[1], inputs.window
    missing = W + T - inputs.k_BSHK.shape[1]
    Q = T if missing else min(tile or default_tile(W), T)
    first = 1 if inputs.include_self else 0
    return cls(T, W, Q, missing, first, T == 1 and first + W > missing)

  @property
  def count(self) -> int:
    """Number of sub-blocks; the last one may be padded."""
    return -(-self.T // self.Q)

  def arrays(self, inputs: AttentionInputs):
    """Returns queries, keys, values, the bias tile and keys_WK for sub-blocks.

    Queries, keys and values have heads before tokens and are padded to whole
    sub-blocks. The bias tile is [H, Q, X]. X is W + Q - missing or, if
    `single`, the number of given keys in the window. keys_WK begins with the
    largest distance, or is None.
    """
    q_BTHK, k_BSHK, keys_WK = inputs.q_BTHK, inputs.k_BSHK, inputs.keys_WK
    if inputs.normalize_own:
      k_BSHK = normalize_own_keys(k_BSHK, self.T)
    if inputs.scale_H is not None:
      q_BTHK = normalize_and_scale(q_BTHK, inputs.scale_H)
    k_BSHK, v_BSHK = repeat_kv_heads(q_BTHK.shape[2], k_BSHK, inputs.v_BSHK)
    bias_HW = inputs.bias_HW.astype(jnp.float32)
    if self.single:
      k_BSHK, v_BSHK = k_BSHK[:, self._near], v_BSHK[:, self._near]
      bias_HQX = self._to_band(bias_HW[:, None, ::-1])
    else:
      include_self = inputs.include_self
      bias_HQX = band_tile(bias_HW, self.Q, include_self)[..., self.missing :]
    if keys_WK is not None:
      keys_WK = keys_WK[::-1]  # Oldest first, as the keys.
    qkv = (self.pad(_heads_first(a)) for a in (q_BTHK, k_BSHK, v_BSHK))
    return *qkv, bias_HQX, keys_WK

  def mask(self, inputs: AttentionInputs):
    """Returns the mask [B, S] bool of the keys that `arrays` returns."""
    mask_BS = inputs.mask_BS
    if self.single:
      mask_BS = mask_BS[:, self._near]
    return jnp.pad(mask_BS, ((0, 0), (0, self.count * self.Q - self.T)))

  def keep_masks(
    self, dropout: Dropout | None, bias_HQX
  ) -> Callable[[jax.Array | int], jax.Array | None]:
    """Returns a function from a sub-block to its dropout factors [H, Q, X].

    The function returns None if there is no dropout.
    """
    if dropout is None:
      return lambda j: None
    if dropout.first is None:
      shared_HQX = dropout.keep_mask(bias_HQX.shape)
      return lambda j: shared_HQX
    of_query = len(bias_HQX), self.W

    def by_position(j):
      keep_QHW = dropout.keep_by_position(j * self.Q, self.Q, of_query)
      return self._to_band(keep_QHW.swapaxes(0, 1))

    return by_position

  def logits(self, q_BHQK, k_BHXK, bias_HQX, keys_WK, mask_BX):
    """Returns a sub-block's logits [B, H, Q, X] float32; MASKED if masked."""
    multiply = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    logits = multiply('bhqk,bhxk->bhqx', q_BHQK, k_BHXK)
    if keys_WK is not None:
      keys_WK = keys_WK.astype(q_BHQK.dtype)
      logits += self._to_band(multiply('bhqk,wk->bhqw', q_BHQK, keys_WK))
    return jnp.where(mask_BX[:, None, None], logits + bias_HQX, MASKED)

  def queries(self, j, a_BHT):
    """Returns the part [B, H, Q, ...] of [B, H, T, ...] for sub-block j."""
    if self.count == 1:
      return a_BHT
    return jax.lax.dynamic_slice_in_dim(a_BHT, j * self.Q, self.Q, 2)

  def keys(self, j, a_S, axis: int):
    """Returns the part of an array for the X keys that sub-block j sees.

    Args:
      j: index of the sub-block.
      a_S: array of all keys, or of values or a mask of all keys.
      axis: axis of the keys in the array.
    """
    if self.count == 1:
      return a_S
    X = self.W + self.Q
    return jax.lax.dynamic_slice_in_dim(a_S, j * self.Q, X, axis)

  def add(self, j, sum_BHSK, part_BHXK):
    """Returns the sums for all keys, with the part for sub-block j added."""
    if self.count == 1:
      return sum_BHSK + part_BHXK
    return jax.lax.dynamic_update_slice_in_dim(
      sum_BHSK, self.keys(j, sum_BHSK, 2) + part_BHXK, j * self.Q, 2
    )

  def join(self, a_NBHQ):
    """Joins results of N sub-blocks: [N, B, H, Q, ...] -> [B, H, N Q, ...]."""
    a_BHNQ = jnp.moveaxis(a_NBHQ, 0, 2)
    B, H, N, Q = a_BHNQ.shape[:4]
    return a_BHNQ.reshape(B, H, N * Q, *a_BHNQ.shape[4:])

  def pad(self, a_BHTK):
    """Appends zeros for tokens that fill the last sub-block."""
    pad = self.count * self.Q - self.T
    return jnp.pad(a_BHTK, ((0, 0), (0, 0), (0, pad), (0, 0)))

  @property
  def _near(self) -> slice:
    start = max(self.first - self.missing, 0)
    return slice(start, self.first + self.W - self.missing)

  def _to_band(self, r_HQW):
    """Moves each query's W values to the columns of the X keys.

    The shapes are [..., Q, W] -> [..., Q, X]. The first value of a query is for
    the largest distance.
    """
    if self.single:
      return r_HQW[..., max(self.missing - self.first, 0) :]
    return band(r_HQW, self.first == 1)[..., self.missing :]


def memory_attend(inputs: MemoryInputs, keep_HTS=None):
  """Returns outputs, and logarithms of each query's sum of exponentials.

  Args:
    inputs: see MemoryInputs.
    keep_HTS: dropout factors of the probabilities, 0 or 1 / (1 - rate), the
      same for all rows; None means that all are 1.

  Returns:
    Outputs [B, T, H, K], zeros in a row without visible slots; and natural
    logarithms [B, H, T] float32.
  """
  q, k, v = _memory_arrays(inputs)
  o, lse_BHT = _attend(_memory_logits(q, k, inputs.mask_BS), v, keep_HTS)
  return o.swapaxes(1, 2), lse_BHT


def memory_gradients(
  inputs: MemoryInputs, keep_HTS, o_BTHK, lse_BHT, do_BTHK
) -> MemoryInputs:
  """Returns the gradient of each input, None for the mask.

  Args:
    inputs, keep_HTS: see memory_attend.
    o_BTHK, lse_BHT: results of memory_attend.
    do_BTHK: gradients of the outputs.
  """
  arrays, to_inputs = jax.vjp(_memory_arrays, inputs.replace(mask_BS=None))
  q, k, v = arrays
  logits, to_operands = jax.vjp(
    functools.partial(_memory_logits, mask_BS=inputs.mask_BS), q, k
  )
  delta_BHT, do = _delta(o_BTHK, do_BTHK), _heads_first(do_BTHK)
  dlogits, dv = _gradients(logits, v, keep_HTS, lse_BHT, delta_BHT, do)
  dq, dk = to_operands(dlogits)
  return to_inputs((dq, dk, dv.astype(v.dtype)))[0]


def _memory_arrays(inputs: MemoryInputs):
  q_BTHK = inputs.q_BTHK
  if inputs.scale_H is not None:
    q_BTHK = normalize_and_scale(q_BTHK, inputs.scale_H)
  kv = repeat_kv_heads(q_BTHK.shape[2], inputs.k_BSHK, inputs.v_BSHK)
  return tuple(map(_heads_first, (q_BTHK, *kv)))


def _memory_logits(q, k, mask_BS):
  logits = jnp.einsum(
    'bhtk,bhsk->bhts', q, k, preferred_element_type=sum_dtype(q)
  )
  return jnp.where(mask_BS[:, None, None], logits, MASKED)


def _attend(logits_BHQX, v_BHXK, keep_HQX):
  """Returns outputs, and logarithms of each query's sum of exponentials.

  Args:
    logits_BHQX: logits of Q queries with X keys.
    v_BHXK: values of the keys.
    keep_HQX: dropout factors of the probabilities; None means that all are 1.

  Returns:
    Outputs [B, H, Q, K], and natural logarithms [B, H, Q].
  """
  # The floor keeps the exponentials of a row without keys at 0.
  top = jnp.maximum(jnp.max(logits_BHQX, -1, keepdims=True), MASKED / 2)
  p = jnp.exp(logits_BHQX - top)
  total = jnp.sum(p, -1, keepdims=True)
  total = jnp.where(total > 0, total, 1)
  if keep_HQX is not None:
    p = p * keep_HQX
  o = jnp.einsum('bhqx,bhxk->bhqk', p.astype(v_BHXK.dtype), v_BHXK)
  return (o / total).astype(v_BHXK.dtype), (top + jnp.log(total))[..., 0]


def _gradients(logits_BHQX, v_BHXK, keep_HQX, lse_BHQ, delta_BHQ, do_BHQK):
  """Returns gradients of logits and values.

  Args:
    logits_BHQX, v_BHXK, keep_HQX: arguments of `_attend`.
    lse_BHQ: logarithms of sums of exponentials, from `_attend`.
    delta_BHQ: result of `_delta`.
    do_BHQK: gradients of the outputs.
  """
  multiply = functools.partial(
    jnp.einsum, preferred_element_type=logits_BHQX.dtype
  )
  p = jnp.exp(logits_BHQX - lse_BHQ[..., None])
  kept = p if keep_HQX is None else p * keep_HQX
  dp = multiply('bhqk,bhxk->bhqx', do_BHQK, v_BHXK)
  dv = multiply('bhqx,bhqk->bhxk', kept.astype(v_BHXK.dtype), do_BHQK)
  return kept * dp - p * delta_BHQ[..., None], dv


def _delta(o_BTHK, do_BTHK):
  """Returns the inner product of each query's output and output gradient.

  The result [B, H, T] equals the sum, over keys, of the query's probabilities
  times the gradients of these probabilities.
  """
  return jnp.einsum(
    'bthk,bthk->bht', o_BTHK, do_BTHK, preferred_element_type=sum_dtype(o_BTHK)
  )


def _heads_first(a_BTHK):
  return a_BTHK.swapaxes(1, 2)


def default_tile(W: int) -> int:
  """Returns the number of queries in a sub-block, for a window of W keys.

  It is W / 4 if that is a whole number of at least 16, else W.
  """
  return W // 4 if W >= 64 and W % 4 == 0 else W


def band_tile(bias_HW, Q: int, include_self: bool):
  """Returns the bias of a sub-block of Q queries and the W + Q keys they see.

  Args:
    bias_HW: bias by distance; index 0 is for the nearest visible key.
    Q: number of queries.
    include_self: whether the nearest visible key is the query's own.

  Returns:
    [H, Q, W + Q], MASKED at keys outside a query's window.
  """
  H, W = bias_HW.shape
  masked = lambda n: jnp.full((H, n), MASKED, bias_HW.dtype)
  first = 1 if include_self else 0
  row = jnp.concatenate(
    [masked(first), bias_HW[:, ::-1], masked(Q + 1 - first)], 1
  )
  # Skewing avoids a gather.
  return skew(jnp.broadcast_to(row[:, None], (H, Q, W + Q + 1)))


def band(r_HQW, include_self: bool):
  """Moves each query's W values to the columns of the W keys that it sees.

  Args:
    r_HQW: W values of each query, [..., Q, W]; the first is for the largest
      distance.
    include_self: whether the nearest visible key is the query's own.

  Returns:
    [..., Q, W + Q], 0 at keys outside a query's window.
  """
  Q = r_HQW.shape[-2]
  first = 1 if include_self else 0
  outside = [(0, 0)] * (r_HQW.ndim - 1) + [(first, Q + 1 - first)]
  return skew(jnp.pad(r_HQW, outside))


def skew(rows):
  """Moves row q right by q columns: [..., Q, X + 1] -> [..., Q, X].

  The first q columns of row q receive the last q values of row q - 1.
  """
  *lead, Q, Y = rows.shape
  # Read back as rows one shorter, each row begins one column later.
  flat = rows.reshape(*lead, Q * Y)[..., : Q * (Y - 1)]
  return flat.reshape(*lead, Q, Y - 1)
