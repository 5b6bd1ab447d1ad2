"""Gradient of the bias of windowed attention, on a GPU.

A program has one tile of distances, and adds up what all blocks and rows give
to it; several share the blocks, so that there are enough of them.
"""

import functools

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from meliad_rec.kernels.gpu_tiles import compiler_params
from meliad_rec.kernels.gpu_tiles import gradients

PROGRAMS = 512  # That fill a GPU.


def of_bias(tiles, arguments, interpret):
  """Gradient of the tile of bias, [H, S, X] float32.

  Args:
    tiles: how blocks are cut.
    arguments: of the kernels of gpu_backward.
    interpret: whether to run without a GPU.
  """
  q_BTHK, k_BSHK = arguments[:2]
  (B, T, H, _), (S, X) = q_BTHK.shape, arguments[7].shape[1:]
  blocks = B * T // S
  parts = max(1, min(PROGRAMS // (H * X // S), blocks))
  whole = lambda a, axis, share=1: pl.BlockSpec(
    tuple(None if n == axis else d for n, d in enumerate(a.shape)),
    lambda j, part, h: tuple(
      jax.lax.div(h, share) if n == axis else 0 for n in range(a.ndim)
    ),
  )
  specs = [whole(q_BTHK, 2), *[whole(k_BSHK, 2, tiles.sharing)] * 2]
  specs += [whole(q_BTHK, 2), *[whole(arguments[4], 1)] * 2]
  specs += [pl.BlockSpec(arguments[6].shape, lambda j, part, h: (0, 0))]
  specs += [whole(a, 0) for a in arguments[7:]]
  part_PHSX = pl.pallas_call(
    functools.partial(_kernel, tiles=tiles, blocks=blocks, parts=parts),
    grid=(X // S, parts, H),
    in_specs=specs,
    out_specs=pl.BlockSpec(
      (None, None, S, S), lambda j, part, h: (part, h, 0, j)
    ),
    out_shape=jax.ShapeDtypeStruct((parts, H, S, X), jnp.float32),
    compiler_params=compiler_params(q_BTHK),
    interpret=interpret,
    name='window_attention_gpu_of_bias',
  )(*arguments)
  return jnp.sum(part_PHSX, 0)


def _kernel(
  q_ref,
  k_ref,
  v_ref,
  do_ref,
  lse_ref,
  mean_ref,
  seen_ref,
  tile_ref,
  scale_ref,
  *rest,
  tiles,
  blocks,
  parts,
):
  *keep_ref, dtile_ref = rest
  S, j, part = tiles.size, pl.program_id(0), pl.program_id(1)
  in_row = q_ref.shape[1] // S
  columns = pl.ds(j * S, S)
  scale, tile = scale_ref[...], tile_ref[:, columns]
  keep = keep_ref[0][:, columns] if keep_ref else None

  def step(n, dtile):
    b, i = jax.lax.div(n, in_row), jax.lax.rem(n, in_row)
    block, near = pl.ds(i * S, S), pl.ds((i + j) * S, S)
    q, _, _ = tiles.query(q_ref[b, block, :], scale)
    _, ds = gradients(
      tiles,
      q,
      k_ref[b, near, :],
      v_ref[b, near, :],
      do_ref[b, block, :],
      lse_ref[b, block],
      mean_ref[b, block],
      seen_ref[b, near],
      tile,
      keep,
    )
    return dtile + ds

  share = -(-blocks // parts)
  first = part * share
  dtile_ref[...] = jax.lax.fori_loop(
    first,
    jnp.minimum(first + share, blocks),
    step,
    jnp.zeros((S, S), jnp.float32),
  )
