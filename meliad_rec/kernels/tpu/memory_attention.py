"""Attention to memory slots by the kernels for TPU: output and gradients."""

import functools

import jax
import jax.numpy as jnp

from meliad_rec.kernels.blocks import LOG2E
from meliad_rec.kernels.blocks import pad_to_multiple
from meliad_rec.kernels.reference import MASKED
from meliad_rec.kernels.reference import MemoryInputs
from meliad_rec.kernels.reference import merge_heads
from meliad_rec.kernels.tpu.blocks import LANES
from meliad_rec.kernels.tpu.blocks import memory_bytes
from meliad_rec.kernels.tpu.blocks import vmem_shortage
from meliad_rec.kernels.tpu.memory_kernels import backward
from meliad_rec.kernels.tpu.memory_kernels import forward
from meliad_rec.kernels.tpu.window_attention import bounded_or_not
from meliad_rec.kernels.tpu.window_attention import transposed

MAX_SLOTS = 4096  # All slots of a row are in VMEM together.


# Compiled once for all layers with equal shapes.
@functools.partial(jax.jit, static_argnames='interpret')
def attend(inputs: MemoryInputs, keep_HTS, *, interpret):
  """Returns outputs, and log2 of each query's sum of exponentials.

  Args:
    inputs: see MemoryInputs.
    keep_HTS: dropout factors of the probabilities, the same for all rows; None
      means that all are 1.
    interpret: see window_attention.attend.

  Returns:
    Outputs [B, T, H, K], and logarithms [B, H, T] float32.
  """
  q_BTHK = inputs.q_BTHK
  T, H = q_BTHK.shape[1:3]
  block = block_size(T)
  arguments = _prepared(inputs, block)

  def softmax(shift_H, is_bounded):
    return forward(
      *arguments,
      inputs.scale_H,
      shift_H * LOG2E,
      _pad_mask(keep_HTS, block),
      block=block,
      is_bounded=is_bounded,
      interpret=interpret,
    )

  o_BTF, lse_BHT = bounded_or_not(softmax, jnp.zeros((H, 1)), inputs.scale_H)
  return o_BTF[:, :T].reshape(q_BTHK.shape), lse_BHT[:, :, :T]


@functools.partial(jax.jit, static_argnames='interpret')
def gradients(
  inputs: MemoryInputs, keep_HTS, o_BTHK, lse_BHT, do_BTHK, *, interpret
) -> MemoryInputs:
  """Returns the gradient of each input, None for the mask.

  Args:
    inputs, keep_HTS, interpret: see `attend`.
    o_BTHK, lse_BHT: results of `attend`.
    do_BTHK: gradients of the outputs.
  """
  q_BTHK, k_BSHK, scale_H = inputs.q_BTHK, inputs.k_BSHK, inputs.scale_H
  T, S = q_BTHK.shape[1], k_BSHK.shape[1]
  block = block_size(T)
  dq, dk, dv, dscale_H = backward(
    *_prepared(inputs, block),
    scale_H,
    transposed(_pad_mask(keep_HTS, block)),
    pad_to_multiple(merge_heads(o_BTHK), block),
    jnp.pad(lse_BHT, ((0, 0), (0, 0), (0, -T % block))),
    pad_to_multiple(merge_heads(do_BTHK), block),
    block=block,
    interpret=interpret,
  )
  return MemoryInputs(
    q_BTHK=dq[:, :T].reshape(q_BTHK.shape),
    k_BSHK=dk[:, :S].reshape(k_BSHK.shape),
    v_BSHK=dv[:, :S].reshape(k_BSHK.shape),
    mask_BS=None,
    scale_H=None if scale_H is None else dscale_H.astype(scale_H.dtype),
  )


def block_size(T: int) -> int:
  """Returns the number of queries in a grid step, for T queries in a row."""
  return min(512, T + -T % LANES)


def unsupported_reason(inputs: MemoryInputs, keep_HTS=None) -> str | None:
  """Returns why these kernels do not support the inputs; None if they do."""
  q_BTHK, k_BSHK = inputs.q_BTHK, inputs.k_BSHK
  (T, K), S = q_BTHK.shape[1::2], k_BSHK.shape[1]
  if K % 64 or K > 256:
    return f'head_dim is {K}; it must be 64, 128, 192 or 256'
  if not LANES // 2 <= S <= MAX_SLOTS or LANES // 2 > T:
    return (
      f'there are {T} queries and {S} slots; there must be at least '
      f'{LANES // 2} of each, and at most {MAX_SLOTS} slots'
    )
  needed = memory_bytes(q_BTHK, k_BSHK, block_size(T), keep_HTS is not None)
  if shortage := vmem_shortage(needed):
    return f'{S} slots and head_dim {K} in {q_BTHK.dtype} {shortage}'
  return None


def _prepared(inputs: MemoryInputs, block: int):
  """Returns the arguments q_BTF, k_BSF, v_BSF and seen_B1S of the kernels."""
  slots = lambda a: pad_to_multiple(merge_heads(a), LANES)
  seen_BS = jnp.where(pad_to_multiple(inputs.mask_BS, LANES), 0, MASKED)
  return (
    pad_to_multiple(merge_heads(inputs.q_BTHK), block),
    slots(inputs.k_BSHK),
    slots(inputs.v_BSHK),
    seen_BS.astype(jnp.float32)[:, None],
  )


def _pad_mask(keep_HTS, block: int):
  """Pads a dropout mask to whole blocks of queries and of LANES slots.

  None stays None.
  """
  if keep_HTS is None:
    return None
  T, S = keep_HTS.shape[1:]
  return jnp.pad(keep_HTS, ((0, 0), (0, -T % block), (0, -S % LANES)))
