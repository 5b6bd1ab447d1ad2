"""Causal sliding-window attention by the kernels for TPU: output and gradients.

The kernels take arrays with merged heads, [B, T, H K], in whole blocks; and one
tile with the bias and the band of a sub-block. See tpu/blocks.py for blocks and
letters, and kernels/blocks.py for the band.
"""

import functools

import jax
import jax.numpy as jnp

from meliad_rec.kernels import blocks
from meliad_rec.kernels.blocks import LOG2E
from meliad_rec.kernels.blocks import pad_to_blocks
from meliad_rec.kernels.blocks import pad_to_multiple
from meliad_rec.kernels.blocks import unpad_keys
from meliad_rec.kernels.reference import AttentionInputs
from meliad_rec.kernels.reference import MASKED
from meliad_rec.kernels.reference import merge_heads
from meliad_rec.kernels.tpu.blocks import LANES
from meliad_rec.kernels.tpu.blocks import vmem_shortage
from meliad_rec.kernels.tpu.blocks import window_bytes
from meliad_rec.kernels.tpu.window_backward import backward
from meliad_rec.kernels.tpu.window_forward import forward
from meliad_rec.kernels.xla import band_tile

# Exponentials of logits further than this below a bound underflow in float32.
RANGE = 80.0


# Compiled once for all layers with equal shapes.
@functools.partial(jax.jit, static_argnames='interpret')
def attend(inputs: AttentionInputs, keep_HSX, *, interpret):
  """Returns outputs, and log2 of each query's sum of exponentials.

  Args:
    inputs: see AttentionInputs; keys_WK is None.
    keep_HSX: dropout factors of the probabilities of a sub-block of S = LANES
      queries and the X = W + S keys that they see; None means that all are 1.
    interpret: as in pallas_call: False to run on a TPU; True or
      pltpu.InterpretParams to run without one.

  Returns:
    Outputs [B, T, H, K], and logarithms [B, H, T] float32.
  """
  q_BTHK, bias_HW = inputs.q_BTHK, inputs.bias_HW
  T, W = q_BTHK.shape[1], inputs.window
  q_BTF, own, past = _prepared(inputs)

  def softmax(shift_H, is_bounded):
    return forward(
      q_BTF,
      own,
      past,
      band_tile(
        (bias_HW - shift_H[:, None]) * LOG2E, LANES, inputs.include_self
      ),
      inputs.scale_H,
      shift_H * LOG2E,
      keep_HSX,
      block=block_size(T, W),
      head_dim=q_BTHK.shape[3],
      normalize_own=inputs.normalize_own,
      is_bounded=is_bounded,
      interpret=interpret,
    )

  o_BTF, lse_BHT = bounded_or_not(softmax, bias_HW, inputs.scale_H)
  return o_BTF[:, :T].reshape(q_BTHK.shape), lse_BHT[:, :, :T]


@functools.partial(jax.jit, static_argnames='interpret')
def gradients(
  inputs: AttentionInputs, keep_HSX, o_BTHK, lse_BHT, do_BTHK, *, interpret
) -> AttentionInputs:
  """Returns the gradient of each input, None for the mask.

  Args:
    inputs, keep_HSX, interpret: see `attend`.
    o_BTHK, lse_BHT: results of `attend`.
    do_BTHK: gradients of the outputs.
  """
  q_BTHK, scale_H = inputs.q_BTHK, inputs.scale_H
  T = q_BTHK.shape[1]
  block = block_size(T, inputs.window)
  q_BTF, own, past = _prepared(inputs)
  tile_HSX, to_bias = jax.vjp(
    lambda bias: band_tile(bias, LANES, inputs.include_self),
    inputs.bias_HW * LOG2E,
  )
  dq, own, past, dtile_HXS, dscale_H = backward(
    q_BTF,
    own,
    past,
    transposed(tile_HSX),
    scale_H,
    transposed(keep_HSX),
    pad_to_multiple(merge_heads(o_BTHK), block),
    # Padded queries have probabilities of 0, whatever the bias is.
    jnp.pad(
      lse_BHT, ((0, 0), (0, 0), (0, -T % block)), constant_values=-MASKED
    ),
    pad_to_multiple(merge_heads(do_BTHK), block),
    block=block,
    head_dim=q_BTHK.shape[3],
    normalize_own=inputs.normalize_own,
    interpret=interpret,
  )
  # The kernel's gradient is with respect to logits to base e, although the tile
  # is to base 2, so the factor LOG2E is not differentiated.
  (dbias_HW,) = to_bias(transposed(dtile_HXS))
  if past:
    own = [jnp.concatenate(parts, 1) for parts in zip(past, own, strict=True)]
  unpad = lambda a: unpad_keys(a, inputs, _past_keys(inputs)).reshape(
    inputs.k_BSHK.shape
  )
  return inputs.replace(
    q_BTHK=dq[:, :T].reshape(q_BTHK.shape),
    k_BSHK=unpad(own[0]),
    v_BSHK=unpad(own[1]),
    mask_BS=None,
    bias_HW=dbias_HW,
    scale_H=None if scale_H is None else dscale_H.astype(scale_H.dtype),
  )


def dropout_shape(inputs: AttentionInputs) -> tuple[int, ...]:
  """Returns the shape [H, S, W + S] of a dropout mask, with S = LANES queries.

  All sub-blocks of S queries and all rows share one mask.
  """
  return len(inputs.bias_HW), LANES, inputs.window + LANES


def unsupported_reason(inputs: AttentionInputs, dropout=None) -> str | None:
  """Returns why these kernels do not support the inputs; None if they do."""
  T, K = inputs.q_BTHK.shape[1::2]
  W = inputs.window
  if W % LANES or K % 64 or K > 256:
    return (
      f'the window is {W} and head_dim is {K}; the window must be a multiple '
      f'of {LANES}, and head_dim 64, 128, 192 or 256'
    )
  if T < LANES:
    # XLA is faster for half a block of queries.
    return f'there are {T} queries; there must be at least {LANES}'
  needed = window_bytes(inputs.q_BTHK, inputs.k_BSHK, W, block_size(T, W))
  if shortage := vmem_shortage(needed):
    dtype = inputs.q_BTHK.dtype
    return f'a window of {W} and head_dim {K} in {dtype} {shortage}'
  return blocks.unsupported_reason(inputs, dropout)


def block_size(T: int, W: int) -> int:
  """Returns the number of queries in a grid step.

  It is the window W if there are at least W queries. Otherwise, it is the
  multiple of LANES that divides W and for which the T queries need the least
  padding to fill whole blocks. If there are several, it is the largest.
  """
  if T >= W:
    return W
  parts = [n for n in range(LANES, W + 1, LANES) if W % n == 0]
  return min(parts, key=lambda n: (T + -T % n, -n))


def bounded_or_not(softmax, bias_HW, scale_H):
  """Returns the result of attention, with an upper bound of logits if possible.

  If queries are normalized (scale_H is not None) and the possible range of the
  logits is small enough that no exponential underflows, shift_H is an upper
  bound of the logits, and is_bounded is True. Otherwise shift_H is 0, and
  is_bounded is False.

  Args:
    softmax: function (shift_H, is_bounded) -> result of attention.
    bias_HW, scale_H: see AttentionInputs.
  """
  zeros_H = jnp.zeros(len(bias_HW))
  if scale_H is None:
    return softmax(zeros_H, False)
  shift_H, range_H = bound(bias_HW, scale_H)
  return jax.lax.cond(
    jnp.max(range_H) < RANGE,
    lambda: softmax(shift_H, True),
    lambda: softmax(zeros_H, False),
  )


def bound(bias_HW, scale_H):
  """Returns upper bounds [H] of each head's logits, and ranges [H] of them.

  A range is the upper bound minus a lower bound of the logits of visible keys.
  The logits are not to base 2. Queries and keys are unit vectors before the
  queries are multiplied by scale_H.

  Args:
    bias_HW, scale_H: see AttentionInputs.
  """
  is_seen_HW = bias_HW > MASKED / 2
  highest_H = jnp.max(jnp.where(is_seen_HW, bias_HW, MASKED), 1)
  lowest_H = jnp.min(jnp.where(is_seen_HW, bias_HW, -MASKED), 1)
  is_any_H = highest_H > MASKED / 2
  highest_H, lowest_H = (
    jnp.where(is_any_H, a, 0) for a in (highest_H, lowest_H)
  )
  # In bfloat16 a unit vector may be slightly longer than 1.
  longest_H = 1.02 * jnp.abs(scale_H)
  return longest_H + highest_H, 2 * longest_H + highest_H - lowest_H


def transposed(a_HSX):
  """Swaps the last two axes; None stays None."""
  return None if a_HSX is None else a_HSX.swapaxes(1, 2)


def _prepared(inputs: AttentionInputs):
  """Returns the arguments q_BTF, own and past of the kernels.

  Layers join past and own keys just before. XLA does not join them if all of
  its operations read one part or the other.
  """
  block = block_size(inputs.q_BTHK.shape[1], inputs.window)
  length = _past_keys(inputs)
  q_BTHK, k_BSHK, v_BSHK, seen_BS = pad_to_blocks(inputs, length, block)

  def part(start, end):
    keys, values = (merge_heads(a[:, start:end]) for a in (k_BSHK, v_BSHK))
    return [keys, values, seen_BS[:, None, start:end]]

  past = part(0, length) if length else None
  return merge_heads(q_BTHK), part(length, None), past


def _past_keys(inputs: AttentionInputs) -> int:
  """Returns how many past keys the kernels read: W if any are given, else 0."""
  has_past = inputs.k_BSHK.shape[1] > inputs.q_BTHK.shape[1]
  return inputs.window if has_past else 0
