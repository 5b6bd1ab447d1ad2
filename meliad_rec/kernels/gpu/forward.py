"""Windowed attention on a GPU: the forward kernel."""

import functools

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from meliad_rec.kernels.blocks import dot
from meliad_rec.kernels.gpu.tiles import compiler_params
from meliad_rec.kernels.gpu.tiles import Tiles
from meliad_rec.kernels.reference import MASKED


def forward(
  q_BTHK,
  k_BSHK,
  v_BSHK,
  seen_BS,
  tile_HSX,
  scale_H,
  keep_HSX,
  *,
  normalize,
  interpret,
):
  """Returns outputs, and logarithms of each query's sum of exponentials.

  Args:
    q_BTHK: queries, in whole blocks of S queries.
    k_BSHK, v_BSHK: keys and values of W past tokens, and then of the T tokens
      of the queries; they may have fewer heads than the queries.
    seen_BS: MASKED at keys that no query may see, and 0 elsewhere.
    tile_HSX: sum of bias and band (see kernels/blocks.py) for a block of S
      queries and the X = W + S keys that they see, to base 2.
    scale_H: scale of each head, by which normalized queries are multiplied.
    keep_HSX: dropout factors of the probabilities of a block; None means that
      all are 1.
    normalize: whether to L2-normalize and scale the queries.
    interpret: whether to run without a GPU.

  Returns:
    Outputs [B, T, H, K], and logarithms to base 2, [B, H, T] float32. Both are
    0 for a query that sees no key.
  """
  B, T, H, K = q_BTHK.shape
  tiles = Tiles(H, K, H // k_BSHK.shape[2], normalize, tile_HSX.shape[1])
  keys = tiles.kv_row(k_BSHK)
  arguments = [q_BTHK, k_BSHK, v_BSHK, seen_BS, tile_HSX, scale_H]
  specs = [tiles.block(), keys, keys, tiles.mask_row(seen_BS)]
  specs += [tiles.head(tile_HSX), tiles.head(scale_H)]
  if keep_HSX is not None:
    arguments.append(keep_HSX)
    specs.append(tiles.head(keep_HSX))
  shape = jax.ShapeDtypeStruct
  return pl.pallas_call(
    functools.partial(_kernel, tiles=tiles),
    grid=(T // tiles.size, B, H),
    in_specs=specs,
    out_specs=[tiles.block(), tiles.block_sums()],
    out_shape=[
      shape(q_BTHK.shape, v_BSHK.dtype),
      shape((B, H, T), jnp.float32),
    ],
    compiler_params=compiler_params(q_BTHK),
    interpret=interpret,
    name='window_attention_gpu_forward',
  )(*arguments)


def _kernel(q_ref, k_ref, v_ref, seen_ref, tile_ref, scale_ref, *rest, tiles):
  *keep_ref, o_ref, lse_ref = rest
  S, first = tiles.size, pl.program_id(0) * tiles.size
  q, _, _ = tiles.query(q_ref[...], scale_ref[...])

  def step(j, carry):
    o, top, total = carry
    near, columns = pl.ds(first + j * S, S), pl.ds(j * S, S)
    s = tiles.logits(q, k_ref[near, :], tile_ref[:, columns], seen_ref[near])
    new_top = jnp.maximum(top, jnp.max(s, 1))
    p = jnp.exp2(s - new_top[:, None])
    rescale = jnp.exp2(top - new_top)
    total = total * rescale + jnp.sum(p, 1)
    if keep_ref:
      p = p * keep_ref[0][:, columns]
    o = o * rescale[:, None] + dot(p.astype(v_ref.dtype), v_ref[near, :])
    return o, new_top, total

  # The floor keeps the exponentials of a row without keys at 0.
  start = (
    jnp.zeros(q.shape, jnp.float32),
    jnp.full(S, MASKED / 2, jnp.float32),
    jnp.zeros(S, jnp.float32),
  )
  o, top, total = jax.lax.fori_loop(0, tile_ref.shape[1] // S, step, start)
  divisor = jnp.where(total > 0, total, 1)
  o_ref[...] = (o / divisor[:, None]).astype(o_ref.dtype)
  lse_ref[...] = jnp.where(total > 0, top + jnp.log2(divisor), 0)
