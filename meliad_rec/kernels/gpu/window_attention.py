"""Causal sliding-window attention by the kernels for GPU: output and gradients.

The kernels are compiled by Triton, for any GPU since Ampere (2020). Pallas's
other compiler, Mosaic, needs a separate kernel for each generation since Hopper
(2022). The softmax uses a running maximum. An upper bound of the logits (see
`bound` in tpu/window_attention.py) would make the maximum unnecessary. But
whether the bound can be used is known only at run time, and a GPU is idle until
the host has decided which branch runs.
"""

import functools
import re

import jax
import jax.numpy as jnp

from meliad_rec.kernels import blocks
from meliad_rec.kernels.blocks import LOG2E
from meliad_rec.kernels.blocks import pad_to_blocks
from meliad_rec.kernels.blocks import pad_to_multiple
from meliad_rec.kernels.blocks import unpad_keys
from meliad_rec.kernels.gpu.backward import backward
from meliad_rec.kernels.gpu.forward import forward
from meliad_rec.kernels.gpu.tiles import tile_size
from meliad_rec.kernels.reference import AttentionInputs
from meliad_rec.kernels.reference import MASKED
from meliad_rec.kernels.reference import normalize_own_keys
from meliad_rec.kernels.xla import band_tile


# Compiled once for all layers with equal shapes.
@functools.partial(jax.jit, static_argnames='interpret')
def attend(inputs: AttentionInputs, keep_HSX, *, interpret):
  """Returns outputs, and log2 of each query's sum of exponentials.

  Args:
    inputs: see AttentionInputs; keys_WK is None.
    keep_HSX: dropout factors of the probabilities, the same for every row and
      every block: of S queries and of the X keys that they see, which are the
      window before the block and the block itself. None means that all are 1.
    interpret: whether to run without a GPU.

  Returns:
    Outputs [B, T, H, K], and logarithms [B, H, T] float32.
  """
  T, K = inputs.q_BTHK.shape[1::2]
  S, scale_H = tile_size(inputs.q_BTHK), inputs.scale_H
  if inputs.normalize_own:
    inputs = inputs.replace(k_BSHK=normalize_own_keys(inputs.k_BSHK, T))
  o_BTHK, lse_BHT = forward(
    *_prepared(inputs, S),
    band_tile(inputs.bias_HW * LOG2E, S, inputs.include_self),
    jnp.ones(len(inputs.bias_HW)) if scale_H is None else scale_H,
    keep_HSX,
    normalize=scale_H is not None,
    interpret=interpret,
  )
  return o_BTHK[:, :T, :, :K], lse_BHT[:, :, :T]


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
  (T, H, K), W = inputs.q_BTHK.shape[1:], inputs.window
  S, scale_H = tile_size(inputs.q_BTHK), inputs.scale_H
  to_unnormalized = lambda dk: dk
  if inputs.normalize_own:
    normalize = lambda k: normalize_own_keys(k, T)
    k_BSHK, pull = jax.vjp(normalize, inputs.k_BSHK)
    inputs = inputs.replace(k_BSHK=k_BSHK)
    to_unnormalized = lambda dk: pull(dk)[0]
  tile_HSX, to_bias = jax.vjp(
    lambda bias: band_tile(bias, S, inputs.include_self),
    inputs.bias_HW * LOG2E,
  )
  delta_BHT = jnp.einsum(
    'bthk,bthk->bht', o_BTHK, do_BTHK, preferred_element_type=jnp.float32
  )
  pad = lambda a_BHT, value: jnp.pad(
    a_BHT, ((0, 0), (0, 0), (0, -T % S)), constant_values=value
  )
  dq, dk, dv, dtile_HSX, dscale_H = backward(
    *_prepared(inputs, S),
    tile_HSX,
    jnp.ones(H) if scale_H is None else scale_H,
    keep_HSX,
    # Padded queries have probabilities of 0, whatever the bias is.
    pad(lse_BHT, -MASKED),
    pad(delta_BHT, 0),
    pad_to_multiple(_pad_head_dim(do_BTHK), S),
    normalize=scale_H is not None,
    interpret=interpret,
  )
  # The kernel's gradient is with respect to logits to base e, although the tile
  # is to base 2, so the factor LOG2E is not differentiated.
  (dbias_HW,) = to_bias(dtile_HSX)
  unpad = lambda a: unpad_keys(a, inputs, W)[..., :K]
  return inputs.replace(
    q_BTHK=dq[:, :T, :, :K],
    k_BSHK=to_unnormalized(unpad(dk)),
    v_BSHK=unpad(dv),
    mask_BS=None,
    bias_HW=dbias_HW,
    scale_H=None if scale_H is None else dscale_H.astype(scale_H.dtype),
  )


def dropout_shape(inputs: AttentionInputs) -> tuple[int, ...]:
  """Returns the shape [H, S, W + S] of a dropout mask.

  All blocks of S queries, and all rows, share one mask.
  """
  S = tile_size(inputs.q_BTHK)
  return len(inputs.bias_HW), S, inputs.window + S


def unsupported_reason(inputs: AttentionInputs, dropout=None) -> str | None:
  """Returns why these kernels do not support the inputs; None if they do."""
  T, K = inputs.q_BTHK.shape[1::2]
  W, S = inputs.window, tile_size(inputs.q_BTHK)
  if W % S or not 16 <= K <= 256:
    return (
      f'the window is {W} and head_dim is {K}; the window must be a multiple '
      f'of {S}, and head_dim 16 to 256'
    )
  if 2 * T < W:
    return (
      f'there are {T} queries; there must be at least {W // 2}, half of the '
      'window'
    )
  return blocks.unsupported_reason(inputs, dropout)


def device_reason() -> str | None:
  """Returns why this machine's GPU cannot run these kernels.

  Returns None if it can, and also if the machine has no GPU, because programs
  for a GPU may be compiled without one.
  """
  device = jax.devices()[0]
  capability = getattr(device, 'compute_capability', '')
  major = re.match(r'(\d+)\.', capability)
  if major and int(major[1]) < 8:
    return (
      'Triton needs a GPU of compute capability 8.0 (Ampere) or higher, got '
      f'{capability}'
    )
  return None


def _prepared(inputs: AttentionInputs, S: int):
  """Returns the arguments q_BTHK, k_BSHK, v_BSHK and seen_BS of the kernels.

  Args:
    inputs: see AttentionInputs.
    S: number of queries in a block.
  """
  q_BTHK, k_BSHK, v_BSHK, seen_BS = pad_to_blocks(inputs, inputs.window, S)
  return *map(_pad_head_dim, (q_BTHK, k_BSHK, v_BSHK)), seen_BS


def _pad_head_dim(a_BTHK):
  """Pads the last axis with zeros to a power of 2, as Triton requires."""
  K = a_BTHK.shape[3]
  missing = (1 << (K - 1).bit_length()) - K
  pads = (0, 0), (0, 0), (0, 0), (0, missing)
  return jnp.pad(a_BTHK, pads) if missing else a_BTHK
