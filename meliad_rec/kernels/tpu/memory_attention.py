"""Attention to memory slots by the kernels for TPU: output and gradients."""

import functools

import jax
import jax.numpy as jnp

from meliad_rec.kernels.blocks import LOG2E
from meliad_rec.kernels.blocks import whole_blocks
from meliad_rec.kernels.reference import NEVER
from meliad_rec.kernels.tpu import blocks
from meliad_rec.kernels.tpu.blocks import LANES
from meliad_rec.kernels.tpu.memory_kernels import backward
from meliad_rec.kernels.tpu.memory_kernels import forward
from meliad_rec.kernels.tpu.window_attention import bound
from meliad_rec.kernels.tpu.window_attention import RANGE
from meliad_rec.kernels.tpu.window_attention import side_by_side
from meliad_rec.kernels.tpu.window_attention import turned

MOST = 4096  # Slots that lie in VMEM together.

# Layers that are alike trace the kernels once.
_once = functools.partial(jax.jit, static_argnames='interpret')


@_once
def attend(q_BTHK, k_BSHK, v_BSHK, mask_BS, scale_H, keep_HTS, *, interpret):
  """Outputs, and logarithms to base 2 of sums of exponentials.

  Args:
    q_BTHK, k_BSHK, v_BSHK, mask_BS, scale_H, keep_HTS: see
      memory_attention_ref.memory_attention.
    interpret: False, or how to run without a TPU.

  Returns:
    [B, T, H, K], and [B, H, T] float32.
  """
  T, H = q_BTHK.shape[1:3]
  Q = block(T)
  arguments = _laid_out(Q, q_BTHK, k_BSHK, v_BSHK, mask_BS)

  def softmax(shift_H, bounded):
    return forward(
      *arguments,
      scale_H,
      shift_H * LOG2E,
      _whole(keep_HTS, Q),
      block=Q,
      bounded=bounded,
      interpret=interpret,
    )

  none_H = jnp.zeros(H)
  if scale_H is None:
    o_BTF, lse_BHT = softmax(none_H, False)
  else:
    shift_H, range_H = bound(jnp.zeros((H, 1)), scale_H)
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
  scale_H,
  keep_HTS,
  o_BTHK,
  lse_BHT,
  do_BTHK,
  *,
  interpret,
):
  """Gradients of q_BTHK, k_BSHK, v_BSHK and scale_H (None: None).

  Args:
    q_BTHK, k_BSHK, v_BSHK, mask_BS, scale_H, keep_HTS, interpret: see attend.
    o_BTHK, lse_BHT: what it returned.
    do_BTHK: gradient of the outputs.
  """
  T, S = q_BTHK.shape[1], k_BSHK.shape[1]
  Q = block(T)
  dq, dk, dv, dscale_H = backward(
    *_laid_out(Q, q_BTHK, k_BSHK, v_BSHK, mask_BS),
    scale_H,
    turned(_whole(keep_HTS, Q)),
    whole_blocks(side_by_side(o_BTHK), Q),
    jnp.pad(lse_BHT, ((0, 0), (0, 0), (0, -T % Q))),
    whole_blocks(side_by_side(do_BTHK), Q),
    block=Q,
    interpret=interpret,
  )
  own = lambda a: a[:, :S].reshape(k_BSHK.shape)
  return (
    dq[:, :T].reshape(q_BTHK.shape),
    own(dk),
    own(dv),
    None if scale_H is None else dscale_H.astype(scale_H.dtype),
  )


def block(T: int) -> int:
  """Queries of a grid step."""
  return min(512, T + -T % LANES)


def unsupported_reason(q_BTHK, k_BSHK, keep_HTS=None) -> str | None:
  """What these kernels do not take; None: they take it all."""
  (T, K), S = q_BTHK.shape[1::2], k_BSHK.shape[1]
  if K % 64 or K > 256:
    return f'heads {K} wide; the width must be 64, 128, 192 or 256'
  if not LANES // 2 <= S <= MOST or LANES // 2 > T:
    return (
      f'{T} queries of {S} slots; there must be {LANES // 2} of each, or more, '
      f'and no more than {MOST} slots'
    )
  drops = keep_HTS is not None
  needed = blocks.of_memory(q_BTHK, k_BSHK, block(T), drops)
  if told := blocks.lacking(needed):
    return f'{S} slots and heads {K} wide of {q_BTHK.dtype}, {told}'
  return None


def _laid_out(Q: int, q_BTHK, k_BSHK, v_BSHK, mask_BS):
  """Heads side by side, in whole blocks; and 0 or NEVER for each slot."""
  slots = lambda a: whole_blocks(side_by_side(a), LANES)
  seen_BS = jnp.where(whole_blocks(mask_BS, LANES), 0, NEVER)
  return (
    whole_blocks(side_by_side(q_BTHK), Q),
    slots(k_BSHK),
    slots(v_BSHK),
    seen_BS.astype(jnp.float32)[:, None],
  )


def _whole(keep_HTS, Q: int):
  """Of whole blocks; None: None."""
  if keep_HTS is None:
    return None
  T, S = keep_HTS.shape[1:]
  return jnp.pad(keep_HTS, ((0, 0), (0, -T % Q), (0, -S % LANES)))
