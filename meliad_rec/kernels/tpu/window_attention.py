"""Causal sliding-window attention by the kernels for TPU: output and gradients.

They take heads side by side, whole blocks, and a tile of bias and band.
"""

import functools

import jax
import jax.numpy as jnp

from meliad_rec.kernels import blocks
from meliad_rec.kernels.blocks import LOG2E
from meliad_rec.kernels.blocks import whole_blocks
from meliad_rec.kernels.reference import NEVER
from meliad_rec.kernels.tpu import blocks as tpu_vmem
from meliad_rec.kernels.tpu.blocks import LANES
from meliad_rec.kernels.tpu.window_backward import backward
from meliad_rec.kernels.tpu.window_forward import forward
from meliad_rec.kernels.xla import band_tile

# Below a bound by more than this, an exponential may be lost in float32.
RANGE = 80.0

# Layers that are alike trace the kernels once.
_once = functools.partial(
  jax.jit, static_argnames=('include_self', 'normalize_own', 'interpret')
)


@_once
def attend(
  q_BTHK,
  k_BSHK,
  v_BSHK,
  mask_BS,
  bias_HW,
  scale_H,
  keep_HSX,
  *,
  include_self,
  normalize_own,
  interpret,
):
  """Outputs, and logarithms to base 2 of sums of exponentials.

  Args:
    q_BTHK, k_BSHK, v_BSHK, mask_BS, bias_HW, scale_H, include_self,
      normalize_own: see reference.window_attention.
    keep_HSX: factors of the probabilities of each LANES queries and the keys
      they see, for dropout; None: all 1.
    interpret: False, or how to run without a TPU.

  Returns:
    [B, T, H, K], and [B, H, T] float32.
  """
  T, W = q_BTHK.shape[1], bias_HW.shape[1]
  block = queries_of_block(T, W)
  q_BTF, *keys = laid_out(q_BTHK, k_BSHK, v_BSHK, mask_BS, W)

  def softmax(shift_H, bounded):
    return forward(
      q_BTF,
      *keys,
      band_tile((bias_HW - shift_H[:, None]) * LOG2E, LANES, include_self),
      scale_H,
      shift_H * LOG2E,
      keep_HSX,
      block=block,
      head_dim=q_BTHK.shape[3],
      normalize_own=normalize_own,
      bounded=bounded,
      interpret=interpret,
    )

  none_H = jnp.zeros(len(bias_HW))
  if scale_H is None:
    o_BTF, lse_BHT = softmax(none_H, False)
  else:
    shift_H, range_H = bound(bias_HW, scale_H)
    o_BTF, lse_BHT = jax.lax.cond(
      jnp.max(range_H) < RANGE,
      lambda: softmax(shift_H, True),
      lambda: softmax(none_H, False),
    )
  return o_BTF[:, :T].reshape(q_BTHK.shape), lse_BHT[:, :, :T]


@_once
def gradients(
  q_BTHK,
  k_BSHK,
  v_BSHK,
  mask_BS,
  bias_HW,
  scale_H,
  keep_HSX,
  o_BTHK,
  lse_BHT,
  do_BTHK,
  *,
  include_self,
  normalize_own,
  interpret,
):
  """Gradients of q_BTHK, k_BSHK, v_BSHK, bias_HW and scale_H (None: None).

  Args:
    q_BTHK, k_BSHK, v_BSHK, mask_BS, bias_HW, scale_H, keep_HSX, include_self,
      interpret: see attend.
    o_BTHK, lse_BHT: what it returned.
    do_BTHK: gradient of the outputs.
  """
  T, W = q_BTHK.shape[1], bias_HW.shape[1]
  block = queries_of_block(T, W)
  q_BTF, k_BSF, v_BSF, seen = laid_out(q_BTHK, k_BSHK, v_BSHK, mask_BS, W)
  tile_HSX, to_bias = jax.vjp(
    lambda bias: band_tile(bias, LANES, include_self), bias_HW * LOG2E
  )
  dq, dk, dv, dtile_HXS, dscale_H = backward(
    q_BTF,
    k_BSF,
    v_BSF,
    seen,
    turned(tile_HSX),
    scale_H,
    turned(keep_HSX),
    whole_blocks(side_by_side(o_BTHK), block),
    # Queries that fill a block have probabilities of 0, whatever the bias is.
    jnp.pad(lse_BHT, ((0, 0), (0, 0), (0, -T % block)), constant_values=-NEVER),
    whole_blocks(side_by_side(do_BTHK), block),
    block=block,
    head_dim=q_BTHK.shape[3],
    normalize_own=normalize_own,
    interpret=interpret,
  )
  # Gradients are those of what logits are before they are taken to base 2.
  past = past_keys(T, k_BSHK, W)
  own = lambda a: blocks.given_keys(a, T, past, k_BSHK).reshape(k_BSHK.shape)
  (dbias_HW,) = to_bias(turned(dtile_HXS))
  return (
    dq[:, :T].reshape(q_BTHK.shape),
    own(dk),
    own(dv),
    dbias_HW,
    None if scale_H is None else dscale_H.astype(scale_H.dtype),
  )


def dropout_block(q_BTHK) -> int:
  """Queries whose probabilities are dropped by one mask."""
  del q_BTHK
  return LANES


def unsupported_reason(q_BTHK, k_BSHK, bias_HW, keys_WK) -> str | None:
  """What these kernels do not take; None: they take it all."""
  K, W = q_BTHK.shape[3], bias_HW.shape[1]
  if W % LANES or K % 64 or K > 256:
    return (
      f'a window of {W} and heads {K} wide; the window must be a multiple of '
      f'{LANES}, the width 64, 128, 192 or 256'
    )
  if q_BTHK.shape[1] < LANES:
    # Half a block of them costs more than XLA's form does.
    return f'{q_BTHK.shape[1]} queries, fewer than {LANES}'
  block = queries_of_block(q_BTHK.shape[1], W)
  if told := tpu_vmem.lacking(tpu_vmem.of_window(q_BTHK, k_BSHK, W, block)):
    return f'a window of {W} and heads {K} wide of {q_BTHK.dtype}, {told}'
  return blocks.unsupported_reason(q_BTHK, k_BSHK, bias_HW, keys_WK)


def turned(a_HSX):
  """[H, X, S]; None: None."""
  return None if a_HSX is None else a_HSX.swapaxes(1, 2)


def laid_out(q_BTHK, k_BSHK, v_BSHK, mask_BS, W: int):
  """Heads side by side, in whole blocks; and 0 or NEVER for each key."""
  T = q_BTHK.shape[1]
  past, block = past_keys(T, k_BSHK, W), queries_of_block(T, W)
  *qkv, seen_BS = blocks.laid_out(q_BTHK, k_BSHK, v_BSHK, mask_BS, past, block)
  return *map(side_by_side, qkv), seen_BS[:, None]


def queries_of_block(T: int, W: int) -> int:
  """As many as a window; of fewer queries, the part that leaves least empty."""
  if T >= W:
    return W
  parts = [n for n in range(LANES, W + 1, LANES) if W % n == 0]
  return min(parts, key=lambda n: (T + -T % n, -n))


def past_keys(T: int, k_BSHK, W: int) -> int:
  """Keys before the queries' own that kernels read: all of them, or none."""
  return W if k_BSHK.shape[1] > T else 0


def side_by_side(a_BSHK):
  """[B, S, H K]."""
  return a_BSHK.reshape(*a_BSHK.shape[:2], -1)


def bound(bias_HW, scale_H):
  """What no logit of unit vectors exceeds, and how far below it they reach."""
  is_seen_HW = bias_HW > NEVER / 2
  highest_H = jnp.max(jnp.where(is_seen_HW, bias_HW, NEVER), 1)
  lowest_H = jnp.min(jnp.where(is_seen_HW, bias_HW, -NEVER), 1)
  is_any_H = highest_H > NEVER / 2
  highest_H, lowest_H = (
    jnp.where(is_any_H, a, 0) for a in (highest_H, lowest_H)
  )
  # In bfloat16 a unit vector may be a little longer.
  longest_H = 1.02 * jnp.abs(scale_H)
  return longest_H + highest_H, 2 * longest_H + highest_H - lowest_H
