"""Causal sliding-window attention by the kernels for GPU: output and gradients.

They are of Pallas by way of Triton, which serves any GPU since Ampere (2020);
by Mosaic's way each generation since Hopper (2022) has a kernel of its own.
Softmax is by a running maximum. A bound (see window_attention_tpu) would spare
it, but whether it holds is known at run time alone, and a GPU waits for such a
branch.
"""

import functools
import re

import jax
import jax.numpy as jnp

from meliad_rec.kernels import blocks
from meliad_rec.kernels.blocks import given_keys
from meliad_rec.kernels.blocks import laid_out
from meliad_rec.kernels.blocks import LOG2E
from meliad_rec.kernels.blocks import whole_blocks
from meliad_rec.kernels.gpu.backward import backward
from meliad_rec.kernels.gpu.forward import forward
from meliad_rec.kernels.gpu.tiles import size
from meliad_rec.kernels.reference import NEVER
from meliad_rec.kernels.reference import normalize_own_keys
from meliad_rec.kernels.xla import band_tile

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
    keep_HSX: factors of the probabilities of each S queries and the keys
      they see, for dropout; None: all 1.
    interpret: whether to run without a GPU.

  Returns:
    [B, T, H, K], and [B, H, T] float32.
  """
  T, K = q_BTHK.shape[1::2]
  W, S, normalize = bias_HW.shape[1], size(q_BTHK), scale_H is not None
  if normalize_own:
    k_BSHK = normalize_own_keys(k_BSHK, T)
  o_BTHK, lse_BHT = forward(
    *laid_out(*widened(q_BTHK, k_BSHK, v_BSHK), mask_BS, W, S),
    band_tile(bias_HW * LOG2E, S, include_self),
    scale_H if normalize else jnp.ones(len(bias_HW)),
    keep_HSX,
    normalize=normalize,
    interpret=interpret,
  )
  return o_BTHK[:, :T, :, :K], lse_BHT[:, :, :T]


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
  (T, H, K), W = q_BTHK.shape[1:], bias_HW.shape[1]
  S, normalize = size(q_BTHK), scale_H is not None
  to_raw = lambda dk: dk
  if normalize_own:
    k_BSHK, pull = jax.vjp(lambda k: normalize_own_keys(k, T), k_BSHK)
    to_raw = lambda dk: pull(dk)[0]
  tile_HSX, to_bias = jax.vjp(
    lambda bias: band_tile(bias, S, include_self), bias_HW * LOG2E
  )
  mean_BHT = jnp.einsum(
    'bthk,bthk->bht', o_BTHK, do_BTHK, preferred_element_type=jnp.float32
  )
  pad = lambda a_BHT, filling: jnp.pad(
    a_BHT, ((0, 0), (0, 0), (0, -T % S)), constant_values=filling
  )
  dq, dk, dv, dtile_HSX, dscale_H = backward(
    *laid_out(*widened(q_BTHK, k_BSHK, v_BSHK), mask_BS, W, S),
    tile_HSX,
    scale_H if normalize else jnp.ones(H),
    keep_HSX,
    # Queries that fill a block have probabilities of 0, whatever the bias is.
    pad(lse_BHT, -NEVER),
    pad(mean_BHT, 0),
    whole_blocks(*widened(do_BTHK), S),
    normalize=normalize,
    interpret=interpret,
  )
  # Gradients are those of what logits are before they are taken to base 2.
  (dbias_HW,) = to_bias(dtile_HSX)
  own = lambda a: given_keys(a, T, W, k_BSHK)[..., :K]
  return (
    dq[:, :T, :, :K],
    to_raw(own(dk)),
    own(dv),
    dbias_HW,
    None if scale_H is None else dscale_H.astype(scale_H.dtype),
  )


def widened(*arrays):
  """With zeros, to heads of a power of 2: Triton knows no others."""
  K = arrays[0].shape[3]
  wider = (1 << (K - 1).bit_length()) - K
  pads = (0, 0), (0, 0), (0, 0), (0, wider)
  return [jnp.pad(a, pads) if wider else a for a in arrays]


def dropout_block(q_BTHK) -> int:
  """Queries S whose probabilities are dropped by one mask."""
  return size(q_BTHK)


def refusal() -> str | None:
  """Why this machine's GPU runs no such kernels; None: it does, or is none."""
  device = jax.devices()[0]
  known = re.match(r'(\d+)\.', getattr(device, 'compute_capability', ''))
  if known and int(known[1]) < 8:
    return 'a GPU of before Ampere, for which there is no Triton'
  return None


def unsupported_reason(q_BTHK, k_BSHK, bias_HW, keys_WK) -> str | None:
  """What these kernels do not take; None: they take it all."""
  K, W, S = q_BTHK.shape[3], bias_HW.shape[1], size(q_BTHK)
  if W % S or not 16 <= K <= 256:
    return (
      f'a window of {W} and heads {K} wide; the window must be a multiple of '
      f'{S}, the width 16 to 256'
    )
  if 2 * q_BTHK.shape[1] < W:
    return f'{q_BTHK.shape[1]} queries are less than half a window of {W}'
  return blocks.unsupported_reason(q_BTHK, k_BSHK, bias_HW, keys_WK)
