"""Causal sliding-window attention in plain XLA: a scan over skewed sub-blocks.

A sub-block of Q queries sees one contiguous slice of X = W + Q keys. A query is
thus multiplied with W + Q keys; in a block of W queries it would be 2 W. The
backward pass recomputes the logits: nothing of size T x W is ever stored. Bias
and band (see kernels/blocks.py) depend on distance only, so one [Q, X] tile per
head serves every sub-block. Vectors added to keys by distance are multiplied
with the queries of each sub-block, and the products are skewed (see `skew`).
"""

import jax
import jax.numpy as jnp

from meliad_rec.kernels.blocks import Dropout
from meliad_rec.kernels.reference import AttentionInputs
from meliad_rec.kernels.reference import NEVER
from meliad_rec.kernels.reference import normalize_and_scale
from meliad_rec.kernels.reference import normalize_own_keys
from meliad_rec.kernels.reference import repeat_kv_heads


def window_attention(
  inputs: AttentionInputs,
  dropout: Dropout | None = None,
  tile: int | None = None,
):
  """Returns attention [B, T, H, K]; zeros for a query that sees no key.

  Args:
    inputs: see AttentionInputs.
    dropout: one mask [H, Q, X] serves all rows and sub-blocks, as in the
      authors' code.
    tile: queries in a sub-block; None: see default_tile. If there are fewer
      than W past keys, one sub-block takes all queries.
  """
  q_BTHK, k_BSHK, mask_BS = inputs.q_BTHK, inputs.k_BSHK, inputs.mask_BS
  keys_WK, include_self = inputs.keys_WK, inputs.include_self
  B, T, H, K = q_BTHK.shape
  W = inputs.window
  if inputs.normalize_own:
    k_BSHK = normalize_own_keys(k_BSHK, T)
  if inputs.scale_H is not None:
    q_BTHK = normalize_and_scale(q_BTHK, inputs.scale_H)
  k_BSHK, v_BSHK = repeat_kv_heads(H, k_BSHK, inputs.v_BSHK)
  missing = W + T - k_BSHK.shape[1]  # Past keys that are not given.
  Q = T if missing else min(tile or default_tile(W), T)
  pad = -T % Q
  n = (T + pad) // Q
  first = 1 if include_self else 0  # Oldest visible key of the first query.
  bias_HW = inputs.bias_HW.astype(jnp.float32)
  if T == 1 and first + W > missing:
    # One query sees one slice of keys: there is no band to lay out.
    near = slice(max(first - missing, 0), first + W - missing)
    k_BSHK, v_BSHK, mask_BS = (a[:, near] for a in (k_BSHK, v_BSHK, mask_BS))
    to_band = lambda r: r[..., max(missing - first, 0) :]
    bias_HQX = to_band(bias_HW[:, None, ::-1])
  else:
    bias_HQX = band_tile(bias_HW, Q, include_self)[..., missing:]
    to_band = lambda r: band(r, include_self)[..., missing:]
  if keys_WK is not None:
    keys_WK = keys_WK[::-1]  # Oldest first, as the keys.
  keep_HQX = None if dropout is None else dropout.keep_mask(bias_HQX.shape)

  def sub_block(q_BHQK, k_BHXK, v_BHXK, mask_BX):
    logits = jnp.einsum(
      'bhqk,bhxk->bhqx', q_BHQK, k_BHXK, preferred_element_type=jnp.float32
    )
    if keys_WK is not None:
      logits += to_band(
        jnp.einsum(
          'bhqk,wk->bhqw',
          q_BHQK,
          keys_WK.astype(q_BHQK.dtype),
          preferred_element_type=jnp.float32,
        )
      )
    logits = jnp.where(mask_BX[:, None, None], logits + bias_HQX, NEVER)
    # The floor keeps the exponentials of a row without keys at 0.
    top = jnp.maximum(jnp.max(logits, -1, keepdims=True), NEVER / 2)
    p = jnp.exp(logits - jax.lax.stop_gradient(top))
    total = jnp.sum(p, -1, keepdims=True)
    total = jnp.where(total > 0, total, 1)
    if keep_HQX is not None:
      p = p * keep_HQX
    o = jnp.einsum('bhqx,bhxk->bhqk', p.astype(v_BHXK.dtype), v_BHXK)
    return (o / total).astype(v_BHXK.dtype)

  heads_first = lambda a: jnp.pad(
    a.swapaxes(1, 2), ((0, 0), (0, 0), (0, pad), (0, 0))
  )
  q, k, v = heads_first(q_BTHK), heads_first(k_BSHK), heads_first(v_BSHK)
  mask_BS = jnp.pad(mask_BS, ((0, 0), (0, pad)))
  if n == 1:
    # Recompute probabilities here too: a surrounding scan would keep them all.
    if T > 1:
      sub_block = jax.checkpoint(sub_block, prevent_cse=False)
    y_BHTK = sub_block(q, k, v, mask_BS)
  else:
    cut = jax.lax.dynamic_slice_in_dim

    def sliced_sub_block(j):
      return sub_block(
        cut(q, j * Q, Q, 2),
        cut(k, j * Q, W + Q, 2),
        cut(v, j * Q, W + Q, 2),
        cut(mask_BS, j * Q, W + Q, 1),
      )

    def body(_, j):
      # Recompute the slices too. If kept, they would take (W + Q) / Q times the
      # memory of k and v.
      return None, jax.checkpoint(sliced_sub_block, prevent_cse=False)(j)

    _, y = jax.lax.scan(body, None, jnp.arange(n))  # [n, B, H, Q, K]
    y_BHTK = jnp.moveaxis(y, 0, 2).reshape(B, H, n * Q, K)
  return y_BHTK[:, :, :T].swapaxes(1, 2)


def default_tile(W: int) -> int:
  """Returns the number of queries in a sub-block.

  It is W / 4 if that is a whole number of at least 16, else W.
  """
  return W // 4 if W >= 64 and W % 4 == 0 else W


def band_tile(bias_HW, Q: int, include_self: bool):
  """Returns the bias of a sub-block [H, Q, W + Q], NEVER outside the band."""
  H, W = bias_HW.shape
  never = lambda n: jnp.full((H, n), NEVER, bias_HW.dtype)
  first = 1 if include_self else 0
  row = jnp.concatenate(
    [never(first), bias_HW[:, ::-1], never(Q + 1 - first)], 1
  )
  # Skewing avoids a gather.
  return skew(jnp.broadcast_to(row[:, None], (H, Q, W + Q + 1)))


def band(r_BHQW, include_self: bool):
  """Returns [B, H, Q, W + Q]: each query's W values in the columns of its keys.

  Elsewhere it is 0.
  """
  Q = r_BHQW.shape[2]
  first = 1 if include_self else 0
  outside = (0, 0), (0, 0), (0, 0), (first, Q + 1 - first)
  return skew(jnp.pad(r_BHQW, outside))


def skew(rows):
  """Moves row q right by q columns: [..., Q, X + 1] -> [..., Q, X]."""
  *lead, Q, Y = rows.shape
  # Read back as rows one shorter, each row begins one column later.
  flat = rows.reshape(*lead, Q * Y)[..., : Q * (Y - 1)]
  return flat.reshape(*lead, Q, Y - 1)
