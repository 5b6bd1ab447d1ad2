"""Windowed attention on a GPU: the backward kernels.

There are three kernels, and each sums gradients in registers. One sums the
gradients of a block of queries, over the keys that the block sees. One sums the
gradients of a block of keys and values, over the queries that see the block.
One sums the gradients of a tile of the bias, over all blocks of queries and all
rows. The compiler removes a kernel whose results are not used.
"""

import functools

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from meliad_rec.kernels.blocks import A_TB
from meliad_rec.kernels.blocks import dot
from meliad_rec.kernels.blocks import LOG2E
from meliad_rec.kernels.gpu.tiles import compiler_params
from meliad_rec.kernels.gpu.tiles import Tiles

PROGRAMS = 512  # Enough to fill a GPU.


def backward(
  q_BTHK,
  k_BSHK,
  v_BSHK,
  seen_BS,
  tile_HSX,
  scale_H,
  keep_HSX,
  lse_BHT,
  delta_BHT,
  do_BTHK,
  *,
  normalize,
  interpret,
):
  """Returns gradients of the inputs, given gradients of the outputs.

  Args:
    q_BTHK, k_BSHK, v_BSHK, seen_BS, tile_HSX, scale_H, keep_HSX, normalize,
      interpret: see forward.forward.
    lse_BHT: logarithms that forward.forward returned.
    delta_BHT: inner product of each query's output and the output's gradient.
    do_BTHK: gradients of the outputs.

  Returns:
    Gradients of q_BTHK, k_BSHK, v_BSHK; of the tile before its conversion to
    base 2, [H, S, X] float32; and of scale_H, zeros [H] if not `normalize`.
  """
  (B, T, H, K), S = q_BTHK.shape, tile_HSX.shape[1]
  tiles = Tiles(H, K, H // k_BSHK.shape[2], normalize, S)
  arguments = [q_BTHK, k_BSHK, v_BSHK, do_BTHK, lse_BHT, delta_BHT]
  arguments += [seen_BS, tile_HSX, scale_H]
  arguments += [] if keep_HSX is None else [keep_HSX]
  heads = [tiles.head(a) for a in arguments[7:]]
  shape = jax.ShapeDtypeStruct

  def call(kernel, blocks, specs, out_specs, out_shape):
    return pl.pallas_call(
      functools.partial(kernel, tiles=tiles),
      grid=(blocks, B, H),
      in_specs=[*specs, tiles.mask_row(seen_BS), *heads],
      out_specs=out_specs,
      out_shape=out_shape,
      compiler_params=compiler_params(q_BTHK),
      interpret=interpret,
      name=f'window_attention_gpu{kernel.__name__}',
    )(*arguments)

  block, sums = tiles.block(), tiles.block_sums()
  keys = tiles.kv_row(k_BSHK)
  dq_BTHK, radial_BHT = call(
    _query_gradients,
    T // S,
    [block, keys, keys, block, sums, sums],
    [block, sums],
    [shape(q_BTHK.shape, q_BTHK.dtype), shape((B, H, T), jnp.float32)],
  )
  # Each query head that shares a key head computes its own gradient of it.
  parts = shape((B, k_BSHK.shape[1], H, K), k_BSHK.dtype)
  queries, row_sums = tiles.row(q_BTHK), tiles.row_sums(lse_BHT)
  keys = tiles.kv_block()
  dk_BSHK, dv_BSHK = (
    _sum_shared_heads(a, k_BSHK.shape)
    for a in call(
      _key_gradients,
      parts.shape[1] // S,
      [queries, keys, keys, queries, row_sums, row_sums],
      [block, block],
      [parts, parts],
    )
  )
  dtile_HSX = _bias_gradient(tiles, arguments, interpret)
  return dq_BTHK, dk_BSHK, dv_BSHK, dtile_HSX, jnp.sum(radial_BHT, (0, 2))


def _sum_shared_heads(a_BSHK, shape):
  if a_BSHK.shape == shape:
    return a_BSHK
  parts = a_BSHK.reshape(*shape[:3], -1, shape[3])
  return jnp.sum(parts, 3, dtype=jnp.float32).astype(a_BSHK.dtype)


def _query_gradients(
  q_ref,
  k_ref,
  v_ref,
  do_ref,
  lse_ref,
  delta_ref,
  seen_ref,
  tile_ref,
  scale_ref,
  *rest,
  tiles,
):
  *keep_ref, dq_ref, radial_ref = rest
  S, first = tiles.size, pl.program_id(0) * tiles.size
  scale, do, lse, delta = (
    ref[...] for ref in (scale_ref, do_ref, lse_ref, delta_ref)
  )
  q, unit, factor = tiles.query(q_ref[...], scale)

  def step(j, dq):
    near, columns = pl.ds(first + j * S, S), pl.ds(j * S, S)
    k, keep = k_ref[near, :], keep_ref[0][:, columns] if keep_ref else None
    _, ds = tiles.logit_gradients(
      q,
      k,
      v_ref[near, :],
      do,
      lse,
      delta,
      seen_ref[near],
      tile_ref[:, columns],
      keep,
    )
    return dq + dot(ds.astype(k.dtype), k)

  dq = jnp.zeros(q.shape, jnp.float32)
  dq = jax.lax.fori_loop(0, tile_ref.shape[1] // S, step, dq)
  radial = jnp.zeros(S, jnp.float32)
  if tiles.normalize:
    radial = jnp.sum(dq * unit, 1)
    dq = (dq - unit * radial[:, None]) * (factor * scale)
  dq_ref[...] = dq.astype(dq_ref.dtype)
  radial_ref[...] = radial


def _key_gradients(
  q_ref,
  k_ref,
  v_ref,
  do_ref,
  lse_ref,
  delta_ref,
  seen_ref,
  tile_ref,
  scale_ref,
  *rest,
  tiles,
):
  *keep_ref, dk_ref, dv_ref = rest
  S, c = tiles.size, pl.program_id(0)
  scale, k, v = (ref[...] for ref in (scale_ref, k_ref, v_ref))
  seen = seen_ref[pl.ds(c * S, S)]

  def step(i, carry):
    dk, dv = carry
    block, columns = pl.ds(i * S, S), pl.ds((c - i) * S, S)
    q, _, _ = tiles.query(q_ref[block, :], scale)
    do, keep = do_ref[block, :], keep_ref[0][:, columns] if keep_ref else None
    kept, ds = tiles.logit_gradients(
      q,
      k,
      v,
      do,
      lse_ref[block],
      delta_ref[block],
      seen,
      tile_ref[:, columns],
      keep,
    )
    dk = dk + dot(ds.astype(q.dtype), q, A_TB)
    return dk, dv + dot(kept.astype(do.dtype), do, A_TB)

  # The blocks of queries that see these keys.
  last = q_ref.shape[0] // S - 1
  window = tile_ref.shape[1] // S - 1
  zeros = jnp.zeros(k.shape, jnp.float32)
  dk, dv = jax.lax.fori_loop(
    jnp.maximum(c - window, 0), jnp.minimum(c, last) + 1, step, (zeros, zeros)
  )
  # Normalized queries were multiplied by log2(e) before the product with keys.
  dk_ref[...] = (dk / LOG2E if tiles.normalize else dk).astype(dk_ref.dtype)
  dv_ref[...] = dv.astype(dv_ref.dtype)


def _bias_gradient(tiles, arguments, interpret):
  """Returns the gradient of tile_HSX before its conversion to base 2, float32.

  A program of the grid takes S of the X columns of one head, and sums their
  gradients over a part of all blocks of queries of all rows. There are enough
  parts to fill the GPU. The sums of the parts are added at the end.

  Args:
    tiles: sizes of the tiles.
    arguments: inputs of the kernels, in the order in which `backward` lists
      them.
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
    functools.partial(_bias_kernel, tiles=tiles, blocks=blocks, parts=parts),
    grid=(X // S, parts, H),
    in_specs=specs,
    out_specs=pl.BlockSpec(
      (None, None, S, S), lambda j, part, h: (part, h, 0, j)
    ),
    out_shape=jax.ShapeDtypeStruct((parts, H, S, X), jnp.float32),
    compiler_params=compiler_params(q_BTHK),
    interpret=interpret,
    name='window_attention_gpu_bias_gradient',
  )(*arguments)
  return jnp.sum(part_PHSX, 0)


def _bias_kernel(
  q_ref,
  k_ref,
  v_ref,
  do_ref,
  lse_ref,
  delta_ref,
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
  blocks_per_row = q_ref.shape[1] // S
  columns = pl.ds(j * S, S)
  scale, tile = scale_ref[...], tile_ref[:, columns]
  keep = keep_ref[0][:, columns] if keep_ref else None

  def step(n, dtile):
    b, i = jax.lax.div(n, blocks_per_row), jax.lax.rem(n, blocks_per_row)
    block, near = pl.ds(i * S, S), pl.ds((i + j) * S, S)
    q, _, _ = tiles.query(q_ref[b, block, :], scale)
    _, ds = tiles.logit_gradients(
      q,
      k_ref[b, near, :],
      v_ref[b, near, :],
      do_ref[b, block, :],
      lse_ref[b, block],
      delta_ref[b, block],
      seen_ref[b, near],
      tile,
      keep,
    )
    return dtile + ds

  blocks_per_part = -(-blocks // parts)
  first = part * blocks_per_part
  dtile_ref[...] = jax.lax.fori_loop(
    first,
    jnp.minimum(first + blocks_per_part, blocks),
    step,
    jnp.zeros((S, S), jnp.float32),
  )
