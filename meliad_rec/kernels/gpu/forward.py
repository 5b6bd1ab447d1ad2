"""Windowed attention on a GPU, forward (see gpu_tiles)."""

import functools

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from meliad_rec.kernels.blocks import dot
from meliad_rec.kernels.gpu.tiles import compiler_params
from meliad_rec.kernels.gpu.tiles import Tiles
from meliad_rec.kernels.reference import NEVER


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
  """Outputs, and logarithms of each query's sum of exponentials.

  Args:
    q_BTHK: queries, whole blocks of S.
    k_BSHK, v_BSHK: W keys of the past, then T own ones; of fewer heads, if each
      serves several heads of queries.
    seen_BS: 0, or NEVER at keys that nobody may see.
    tile_HSX: bias and band of a block, to base 2.
    scale_H: of unit queries.
    keep_HSX: factors of the probabilities, for dropout; None: all 1.
    normalize: whether queries are brought to unit length.
    interpret: whether to run without a GPU.

  Returns:
    [B, T, H, K], and [B, H, T] float32 to base 2.
  """
  B, T, H, K = q_BTHK.shape
  tiles = Tiles(H, K, H // k_BSHK.shape[2], normalize, tile_HSX.shape[1])
  keys = tiles.tokens(k_BSHK, of_keys=True)
  arguments = [q_BTHK, k_BSHK, v_BSHK, seen_BS, tile_HSX, scale_H]
  specs = [tiles.block(), keys, keys, tiles.rows(seen_BS)]
  specs += [tiles.of_head(tile_HSX), tiles.of_head(scale_H)]
  if keep_HSX is not None:
    arguments.append(keep_HSX)
    specs.append(tiles.of_head(keep_HSX))
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
    higher = jnp.maximum(top, jnp.max(s, 1))
    p = jnp.exp2(s - higher[:, None])
    less = jnp.exp2(top - higher)
    total = total * less + jnp.sum(p, 1)
    if keep_ref:
      p = p * keep_ref[0][:, columns]
    o = o * less[:, None] + dot(p.astype(v_ref.dtype), v_ref[near, :])
    return o, higher, total

  # The floor keeps the exponentials of a row without keys at 0.
  start = (
    jnp.zeros(q.shape, jnp.float32),
    jnp.full(S, NEVER / 2, jnp.float32),
    jnp.zeros(S, jnp.float32),
  )
  o, top, total = jax.lax.fori_loop(0, tile_ref.shape[1] // S, step, start)
  whole = jnp.where(total > 0, total, 1)
  o_ref[...] = (o / whole[:, None]).astype(o_ref.dtype)
  lse_ref[...] = jnp.where(total > 0, top + jnp.log2(whole), 0)
