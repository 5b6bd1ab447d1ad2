"""Attention to memory on a TPU: windowed attention without the window.

A grid step reads one block of queries of several heads; all slots of a row stay
in VMEM for all of its blocks. What is done with a block is tpu_forward's and
tpu_backward's.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from meliad_rec.kernels.blocks import LOG2E
from meliad_rec.kernels.tpu.blocks import across
from meliad_rec.kernels.tpu.blocks import as_column
from meliad_rec.kernels.tpu.blocks import bytes_needed
from meliad_rec.kernels.tpu.blocks import heads_of_step
from meliad_rec.kernels.tpu.blocks import LANES
from meliad_rec.kernels.tpu.blocks import MemoryBlocks
from meliad_rec.kernels.tpu.window_backward import add_gradients
from meliad_rec.kernels.tpu.window_backward import of_key_heads
from meliad_rec.kernels.tpu.window_forward import pack
from meliad_rec.kernels.tpu.window_forward import write_outputs


def forward(
  q_BTF,
  k_BSF,
  v_BSF,
  seen_B1S,
  scale_H,
  shift_H,
  keep_HTS,
  *,
  block,
  bounded,
  interpret,
):
  """Outputs, and logarithms of each query's sum of exponentials.

  Args:
    q_BTF: queries, the heads side by side; whole blocks.
    k_BSF, v_BSF: slots, a multiple of LANES.
    seen_B1S: 0, or NEVER at slots that nobody may see.
    scale_H: queries are brought to unit length and multiplied with it; None:
      they are as they shall be.
    shift_H: [H], to base 2: no logit exceeds it, where bounded; else 0.
    keep_HTS: factors of the probabilities, for dropout; None: all 1.
    block: queries of one.
    bounded, interpret: see tpu_forward.forward.

  Returns:
    [B, T, H K], and [B, H, T] float32 to base 2.
  """
  (B, T, F), H = q_BTF.shape, len(shift_H)
  cut = _Cut(q_BTF, k_BSF, H, block, 4)
  blocks, grid = cut.blocks, cut.grid
  normalize = scale_H is not None
  scalars_H12 = pack(scale_H if normalize else jnp.ones(H), shift_H)
  arguments = [q_BTF, k_BSF, v_BSF, seen_B1S, scalars_H12]
  specs = [cut.here, cut.keys, cut.keys, cut.row, cut.of_heads(scalars_H12)]
  if keep_HTS is not None:
    arguments.append(keep_HTS)
    shape = blocks.num_heads, block, blocks.slots
    specs.append(pl.BlockSpec(shape, lambda h, b, i: (h, i, 0)))
  tile = LANES * blocks.slots * 4
  written = [cut.here, cut.sums]
  o_BTF, lse_BNGT = pl.pallas_call(
    functools.partial(
      _forward, blocks=blocks, normalize=normalize, bounded=bounded
    ),
    grid=grid,
    in_specs=specs,
    out_specs=written,
    out_shape=[
      jax.ShapeDtypeStruct(q_BTF.shape, v_BSF.dtype),
      jax.ShapeDtypeStruct((B, grid[0], blocks.num_heads, T), jnp.float32),
    ],
    compiler_params=cut.compiler_params([*specs, *written], (), 16 * tile),
    cost_estimate=pl.CostEstimate(
      flops=4 * B * T * F * blocks.slots,
      transcendentals=B * H * T * blocks.slots,
      bytes_accessed=2 * (q_BTF.nbytes + k_BSF.nbytes),
    ),
    interpret=interpret,
    name=f'memory_attention_forward_{"bounded" if bounded else "maximum"}',
  )(*arguments)
  return o_BTF, lse_BNGT.reshape(B, H, T)


def backward(
  q_BTF,
  k_BSF,
  v_BSF,
  seen_B1S,
  scale_H,
  keep_HST,
  o_BTF,
  lse_BHT,
  do_BTF,
  *,
  block,
  interpret,
):
  """Gradients of q_BTF, k_BSF, v_BSF and scale_H, from that of the outputs.

  Args:
    q_BTF, k_BSF, v_BSF, seen_B1S, scale_H, block, interpret: see forward.
    keep_HST: factors of the probabilities, transposed; None: all 1.
    o_BTF, lse_BHT: what forward returned.
    do_BTF: gradient of the outputs.
  """
  (B, T, F), H = q_BTF.shape, lse_BHT.shape[1]
  cut = _Cut(q_BTF, k_BSF, H, block, 2)
  blocks, grid = cut.blocks, cut.grid
  S, width = blocks.slots, blocks.key_width
  normalize = scale_H is not None
  scalars_H11 = pack(scale_H if normalize else jnp.ones(H))
  arguments = [q_BTF, do_BTF, o_BTF, k_BSF, v_BSF, seen_B1S]
  arguments += [lse_BHT.reshape(B, grid[0], blocks.num_heads, T), scalars_H11]
  specs = [cut.here, cut.here, cut.here, cut.keys, cut.keys, cut.row, cut.sums]
  specs.append(cut.of_heads(scalars_H11))
  if keep_HST is not None:
    arguments.append(keep_HST)
    specs.append(
      pl.BlockSpec((blocks.num_heads, S, block), lambda h, b, i: (h, 0, i))
    )
  shape = jax.ShapeDtypeStruct
  # Key heads shared by several steps have a gradient of each of them.
  dk = shape((B, S, grid[0] * width), k_BSF.dtype)
  done = pl.BlockSpec((1, S, width), lambda h, b, i: (b, 0, h))
  scratch = [((S, LANES), jnp.float32), *[((S, width), jnp.float32)] * 2]
  dq_BTF, dk_BSF, dv_BSF, dscale_H11 = pl.pallas_call(
    functools.partial(_backward, blocks=blocks, normalize=normalize),
    grid=grid,
    in_specs=specs,
    out_specs=[cut.here, done, done, cut.of_heads(scalars_H11)],
    out_shape=[
      shape(q_BTF.shape, q_BTF.dtype),
      dk,
      dk,
      shape(scalars_H11.shape, jnp.float32),
    ],
    scratch_shapes=[pltpu.VMEM(*each) for each in scratch],
    compiler_params=cut.compiler_params(
      [*specs, cut.here, done, done], scratch, 24 * LANES * S * 4
    ),
    cost_estimate=pl.CostEstimate(
      flops=10 * B * T * F * S,
      transcendentals=B * H * T * S,
      bytes_accessed=4 * (q_BTF.nbytes + k_BSF.nbytes),
    ),
    interpret=interpret,
    name='memory_attention_backward',
  )(*arguments)
  dk_BSF, dv_BSF = (of_key_heads(a, k_BSF, width) for a in (dk_BSF, dv_BSF))
  return dq_BTF, dk_BSF, dv_BSF, dscale_H11[:, 0, 0]


class _Cut:
  """How the arrays of both kernels are cut over a grid (heads, B, blocks)."""

  def __init__(self, q_BTF, k_BSF, heads: int, block: int, wanted: int):
    (B, T, F), S = q_BTF.shape, k_BSF.shape[1]
    K, sharing = F // heads, F // k_BSF.shape[2]
    G = heads_of_step(
      heads, K, sharing, min(S, 512), wanted, backward=wanted == 2
    )
    self.blocks = MemoryBlocks(block, K, G, sharing, slots=S)
    self.grid = heads // G, B, T // block
    width, key_group = self.blocks.key_width, self.blocks.key_group
    self.here = pl.BlockSpec(
      (1, block, self.blocks.width), lambda h, b, i: (b, i, h)
    )
    self.keys = pl.BlockSpec(
      (1, S, width), lambda h, b, i: (b, 0, key_group(h))
    )
    self.row = pl.BlockSpec((1, 1, S), lambda h, b, i: (b, 0, 0))
    self.sums = pl.BlockSpec((1, 1, G, block), lambda h, b, i: (b, h, 0, i))

  def of_heads(self, a):
    return pl.BlockSpec(
      (self.blocks.num_heads, *a.shape[1:]),
      lambda h, b, i: (h,) + (0,) * (a.ndim - 1),
    )

  def compiler_params(self, moved, scratch, tiles: int):
    blocks = [(spec.block_shape, jnp.float32) for spec in moved]
    return pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary', 'arbitrary'),
      vmem_limit_bytes=bytes_needed(blocks, scratch, tiles),
    )


def _forward(
  q_ref, k_ref, v_ref, seen_ref, scalars_ref, *rest, blocks, normalize, bounded
):
  *keep_ref, o_ref, lse_ref = rest
  write_outputs(
    blocks,
    q_ref,
    functools.partial(blocks.read, k_ref.at[0]),
    v_ref.at[0],
    scalars_ref,
    lambda j, head: seen_ref[0] - scalars_ref[head, :, 1:2],
    _keep(keep_ref, lambda ref, j, head: ref[head, blocks.queries(j), :]),
    o_ref,
    lse_ref,
    normalize=normalize,
    bounded=bounded,
  )


def _backward(
  q_ref,
  do_ref,
  o_ref,
  k_ref,
  v_ref,
  seen_ref,
  lse_ref,
  scalars_ref,
  *rest,
  blocks,
  normalize,
):
  *keep_ref, dq_ref, dk_ref, dv_ref, dscale_ref = rest[:-3]
  seen, dkeys, dvalues = rest[-3:]
  keys = k_ref.at[0]
  b, i = pl.program_id(1), pl.program_id(2)

  @pl.when(i == 0)
  def _():
    seen[...] = as_column(seen_ref[0])
    for sums in (dkeys, dvalues):
      sums[...] = jnp.zeros(sums.shape)

  @pl.when((i == 0) & (b == 0))
  def _():
    dscale_ref[...] = jnp.zeros(dscale_ref.shape)

  add_gradients(
    blocks,
    (q_ref, do_ref, o_ref, lse_ref, scalars_ref),
    (functools.partial(blocks.read, keys), keys, v_ref.at[0]),
    lambda j, head: across(seen[...], blocks.sub_block),
    _keep(keep_ref, lambda ref, j, head: ref[head, :, blocks.queries(j)]),
    (dq_ref, dkeys, dvalues, dscale_ref),
    lambda head, ds: None,
    normalize=normalize,
  )

  @pl.when(i == pl.num_programs(2) - 1)
  def _():
    # With unit queries, those that keys met were taken to base 2.
    factor = 1 / LOG2E if normalize else 1
    dk_ref[0] = (dkeys[...] * factor).astype(dk_ref.dtype)
    dv_ref[0] = dvalues[...].astype(dv_ref.dtype)


def _keep(keep_ref, read):
  """Factors of the probabilities of a sub-block; None: there are none."""
  return functools.partial(read, keep_ref[0]) if keep_ref else None
