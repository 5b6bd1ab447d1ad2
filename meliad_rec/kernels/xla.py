"""Causal sliding-window attention in plain XLA: a scan over skewed sub-blocks.

Sub-block j of S queries sees one contiguous slice of W + S keys, so the band
costs W + S keys a query instead of 2 W, and its backward pass recomputes the
logits: nothing of size T x W is ever stored. Bias and band depend on distance
alone, so one [S, W + S] tile per head serves every sub-block. What keys get by
distance does not: it is multiplied with the queries of each, then skewed.
"""

import jax
import jax.numpy as jnp

from meliad_rec.kernels.reference import NEVER
from meliad_rec.kernels.reference import normalize_own_keys
from meliad_rec.kernels.reference import of_each_head
from meliad_rec.kernels.reference import scaled_unit


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
  dropout_rng=None,
  dropout_rate=0.0,
  tile=None,
):
  """As `window_attention_ref.window_attention`, which defines it.

  Args:
    q_BTHK, k_BSHK, v_BSHK, mask_BS, bias_HW, scale_H, keys_WK, include_self,
      normalize_own: see there.
    dropout_rng: key for dropout of attention probabilities; None: no dropout.
    dropout_rate: share of probabilities dropped. One mask [H, tile, W + tile]
      serves all rows and sub-blocks, as in the authors' code.
    tile: queries in a sub-block; None: chosen by the shapes. A past shorter
      than the window takes all of them at once.

  Returns:
    [B, T, H, K]; zeros for a query that sees no key.
  """
  B, T, H, K = q_BTHK.shape
  if normalize_own:
    k_BSHK = normalize_own_keys(k_BSHK, T)
  if scale_H is not None:
    q_BTHK = scaled_unit(q_BTHK, scale_H)
  k_BSHK, v_BSHK = of_each_head(k_BSHK, H), of_each_head(v_BSHK, H)
  W = bias_HW.shape[1]
  missing = W + T - k_BSHK.shape[1]  # Of the past.
  Q = T if missing else min(tile or default_tile(W), T)
  pad = -T % Q
  n = (T + pad) // Q
  first = 1 if include_self else 0
  bias_HW = bias_HW.astype(jnp.float32)
  if T == 1 and first + W > missing:
    # One query sees one slice of keys: there is no band to lay out.
    near = slice(max(first - missing, 0), first + W - missing)
    k_BSHK, v_BSHK, mask_BS = (a[:, near] for a in (k_BSHK, v_BSHK, mask_BS))
    lay = lambda r: r[..., max(missing - first, 0) :]
    bias_HQX = lay(bias_HW[:, None, ::-1])
  else:
    bias_HQX = band_tile(bias_HW, Q, include_self)[..., missing:]
    lay = lambda r: skew(r, include_self)[..., missing:]
  if keys_WK is not None:
    keys_WK = keys_WK[::-1]  # Oldest first, as the keys.
  keep_HQX = None
  if dropout_rng is not None and dropout_rate:
    keep_HQX = jax.random.bernoulli(
      dropout_rng, 1 - dropout_rate, bias_HQX.shape
    ) / (1 - dropout_rate)

  def sub_block(q_BHQK, k_BHXK, v_BHXK, mask_BX):
    logits = jnp.einsum(
      'bhqk,bhxk->bhqx', q_BHQK, k_BHXK, preferred_element_type=jnp.float32
    )
    if keys_WK is not None:
      logits += lay(
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
    # Probabilities are made again here too: a scan around would keep them all.
    remade = jax.checkpoint(sub_block, prevent_cse=False)
    y_BHTK = (sub_block if T == 1 else remade)(q, k, v, mask_BS)
  else:
    cut = jax.lax.dynamic_slice_in_dim

    def one(j):
      return sub_block(
        cut(q, j * Q, Q, 2),
        cut(k, j * Q, W + Q, 2),
        cut(v, j * Q, W + Q, 2),
        cut(mask_BS, j * Q, W + Q, 1),
      )

    def body(_, j):
      # The slices are made again too, or each would be kept: W / Q times k, v.
      return None, jax.checkpoint(one, prevent_cse=False)(j)

    _, y = jax.lax.scan(body, None, jnp.arange(n))  # [n, B, H, Q, K]
    y_BHTK = jnp.moveaxis(y, 0, 2).reshape(B, H, n * Q, K)
  return y_BHTK[:, :, :T].swapaxes(1, 2)


def default_tile(W: int) -> int:
  """Queries in a sub-block: a quarter of the window, where that is not tiny."""
  return W // 4 if W >= 64 and W % 4 == 0 else W


def band_tile(bias_HW, Q: int, include_self: bool):
  """[H, Q, W + Q] bias of a sub-block, NEVER outside the band; no gather."""
  H, W = bias_HW.shape
  never = lambda n: jnp.full((H, n), NEVER, bias_HW.dtype)
  first = 1 if include_self else 0
  row = jnp.concatenate(
    [never(first), bias_HW[:, ::-1], never(Q + 1 - first)], 1
  )
  return skewed(jnp.broadcast_to(row[:, None], (H, Q, W + Q + 1)))


def skew(r_BHQW, include_self: bool):
  """[B, H, Q, W + Q]: what each query has of its W keys, 0 outside the band."""
  Q = r_BHQW.shape[2]
  first = 1 if include_self else 0
  outside = (0, 0), (0, 0), (0, 0), (first, Q + 1 - first)
  return skewed(jnp.pad(r_BHQW, outside))


def skewed(wide):
  """[..., Q, X + 1] -> [..., Q, X]: row q moved q places to the right."""
  *lead, Q, Y = wide.shape
  # Read back with a row one shorter, every row moves one place more.
  flat = wide.reshape(*lead, Q * Y)[..., : Q * (Y - 1)]
  return flat.reshape(*lead, Q, Y - 1)
