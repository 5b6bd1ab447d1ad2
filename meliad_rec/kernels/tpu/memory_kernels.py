"""Attention to memory slots on a TPU: the forward and the backward kernel.

A grid step reads one block of queries of several heads; all slots of a row stay
in VMEM for all blocks of the row. A block is processed by the same code as in
windowed attention: see window_forward.py and window_backward.py. Letters as in
tpu/blocks.py, except for S, the number of slots.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from meliad_rec.kernels.blocks import LOG2E
from meliad_rec.kernels.tpu.blocks import heads_per_step
from meliad_rec.kernels.tpu.blocks import LANES
from meliad_rec.kernels.tpu.blocks import MemoryBlocks
from meliad_rec.kernels.tpu.blocks import to_columns
from meliad_rec.kernels.tpu.blocks import vmem_limit
from meliad_rec.kernels.tpu.blocks import widen
from meliad_rec.kernels.tpu.window_backward import add_gradients
from meliad_rec.kernels.tpu.window_backward import sum_shared_heads
from meliad_rec.kernels.tpu.window_forward import pack_scalars
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
  is_bounded,
  interpret,
):
  """Returns outputs, and logarithms of each query's sum of exponentials.

  Args:
    q_BTF: queries, the heads merged, in whole blocks.
    k_BSF, v_BSF: keys and values of the slots; S is a multiple of LANES.
    seen_B1S: numbers added to the logits: the constant MASKED at slots that no
      query may see, and 0 elsewhere.
    scale_H: scale of each head, by which L2-normalized queries are multiplied.
      None means that the queries are already scaled.
    shift_H: upper bound of the logits, to base 2, if is_bounded; else 0.
    keep_HTS: dropout factors of the probabilities; None means that all are 1.
    block: number of queries in a block.
    is_bounded, interpret: see window_forward.forward.

  Returns:
    Outputs [B, T, H K], and logarithms to base 2, [B, H, T] float32. Both are 0
    in a row without visible slots.
  """
  (B, T, F), H = q_BTF.shape, len(shift_H)
  grid = _Grid(q_BTF, k_BSF, H, block, 4)
  blocks = grid.blocks
  normalize = scale_H is not None
  scalars_H12 = pack_scalars(scale_H if normalize else jnp.ones(H), shift_H)
  arguments = [q_BTF, k_BSF, v_BSF, seen_B1S, scalars_H12]
  specs = [grid.queries, grid.keys, grid.keys]
  specs += [grid.mask, grid.heads(scalars_H12)]
  if keep_HTS is not None:
    arguments.append(keep_HTS)
    shape = blocks.num_heads, block, blocks.slots
    specs.append(pl.BlockSpec(shape, lambda h, b, i: (h, i, 0)))
  tile = LANES * blocks.slots * 4
  out_specs = [grid.queries, grid.sums]
  o_BTF, lse_BNGT = pl.pallas_call(
    functools.partial(
      _forward, blocks=blocks, normalize=normalize, is_bounded=is_bounded
    ),
    grid=grid.shape,
    in_specs=specs,
    out_specs=out_specs,
    out_shape=[
      jax.ShapeDtypeStruct(q_BTF.shape, v_BSF.dtype),
      jax.ShapeDtypeStruct(
        (B, grid.shape[0], blocks.num_heads, T), jnp.float32
      ),
    ],
    compiler_params=grid.compiler_params([*specs, *out_specs], (), 16 * tile),
    cost_estimate=pl.CostEstimate(
      flops=4 * B * T * F * blocks.slots,
      transcendentals=B * H * T * blocks.slots,
      bytes_accessed=2 * (q_BTF.nbytes + k_BSF.nbytes),
    ),
    interpret=interpret,
    name=f'memory_attention_forward_{"bounded" if is_bounded else "maximum"}',
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
  """Returns gradients of q_BTF, k_BSF, v_BSF and scale_H (zeros if it is None).

  Args:
    q_BTF, k_BSF, v_BSF, seen_B1S, scale_H, block, interpret: see `forward`.
    keep_HST: dropout factors of the probabilities, transposed; None means that
      all are 1.
    o_BTF, lse_BHT: results of `forward`.
    do_BTF: gradients of the outputs.
  """
  (B, T, F), H = q_BTF.shape, lse_BHT.shape[1]
  grid = _Grid(q_BTF, k_BSF, H, block, 2)
  blocks = grid.blocks
  S, width = blocks.slots, blocks.kv_width
  normalize = scale_H is not None
  scalars_H11 = pack_scalars(scale_H if normalize else jnp.ones(H))
  arguments = [q_BTF, do_BTF, o_BTF, k_BSF, v_BSF, seen_B1S]
  arguments += [
    lse_BHT.reshape(B, grid.shape[0], blocks.num_heads, T),
    scalars_H11,
  ]
  specs = [grid.queries] * 3 + [grid.keys] * 2
  specs += [grid.mask, grid.sums, grid.heads(scalars_H11)]
  if keep_HST is not None:
    arguments.append(keep_HST)
    specs.append(
      pl.BlockSpec((blocks.num_heads, S, block), lambda h, b, i: (h, 0, i))
    )
  shape = jax.ShapeDtypeStruct
  # Each grid step that shares a key head computes its own gradient of it.
  dk_shape = shape((B, S, grid.shape[0] * width), k_BSF.dtype)
  dk_spec = pl.BlockSpec((1, S, width), lambda h, b, i: (b, 0, h))
  scratch = [((S, LANES), jnp.float32), *[((S, width), jnp.float32)] * 2]
  dq_BTF, dk_BSF, dv_BSF, dscale_H11 = pl.pallas_call(
    functools.partial(_backward, blocks=blocks, normalize=normalize),
    grid=grid.shape,
    in_specs=specs,
    out_specs=[grid.queries, dk_spec, dk_spec, grid.heads(scalars_H11)],
    out_shape=[
      shape(q_BTF.shape, q_BTF.dtype),
      dk_shape,
      dk_shape,
      shape(scalars_H11.shape, jnp.float32),
    ],
    scratch_shapes=[pltpu.VMEM(*each) for each in scratch],
    compiler_params=grid.compiler_params(
      [*specs, grid.queries, dk_spec, dk_spec], scratch, 24 * LANES * S * 4
    ),
    cost_estimate=pl.CostEstimate(
      flops=10 * B * T * F * S,
      transcendentals=B * H * T * S,
      bytes_accessed=4 * (q_BTF.nbytes + k_BSF.nbytes),
    ),
    interpret=interpret,
    name='memory_attention_backward',
  )(*arguments)
  columns = k_BSF.shape[2]
  dk_BSF, dv_BSF = (
    sum_shared_heads(a, columns, width) for a in (dk_BSF, dv_BSF)
  )
  return dq_BTF, dk_BSF, dv_BSF, dscale_H11[:, 0, 0]


class _Grid:
  """The grid and the block specs of a kernel.

  The axes of the grid are groups of query heads, rows, and blocks of queries.
  """

  def __init__(self, q_BTF, k_BSF, H: int, block: int, preferred: int):
    (B, T, F), S = q_BTF.shape, k_BSF.shape[1]
    K, sharing = F // H, F // k_BSF.shape[2]
    G = heads_per_step(
      H, K, sharing, min(S, 512), preferred, backward=preferred == 2
    )
    self.blocks = MemoryBlocks(block, K, G, sharing, slots=S)
    self.shape = H // G, B, T // block
    width, kv_group = self.blocks.kv_width, self.blocks.kv_group
    self.queries = pl.BlockSpec(
      (1, block, self.blocks.width), lambda h, b, i: (b, i, h)
    )
    self.keys = pl.BlockSpec((1, S, width), lambda h, b, i: (b, 0, kv_group(h)))
    self.mask = pl.BlockSpec((1, 1, S), lambda h, b, i: (b, 0, 0))
    self.sums = pl.BlockSpec((1, 1, G, block), lambda h, b, i: (b, h, 0, i))

  def heads(self, a):
    return pl.BlockSpec(
      (self.blocks.num_heads, *a.shape[1:]),
      lambda h, b, i: (h,) + (0,) * (a.ndim - 1),
    )

  def compiler_params(self, moved, scratch, tiles: int):
    blocks = [(spec.block_shape, jnp.float32) for spec in moved]
    return pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary', 'arbitrary'),
      vmem_limit_bytes=vmem_limit(blocks, scratch, tiles),
    )


def _forward(
  q_ref,
  k_ref,
  v_ref,
  seen_ref,
  scalars_ref,
  *rest,
  blocks,
  normalize,
  is_bounded,
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
    is_bounded=is_bounded,
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
    seen[...] = to_columns(seen_ref[0])
    for sums in (dkeys, dvalues):
      sums[...] = jnp.zeros(sums.shape)

  @pl.when((i == 0) & (b == 0))
  def _():
    dscale_ref[...] = jnp.zeros(dscale_ref.shape)

  add_gradients(
    blocks,
    (q_ref, do_ref, o_ref, lse_ref, scalars_ref),
    (functools.partial(blocks.read, keys), keys, v_ref.at[0]),
    lambda j, head: widen(seen[...], blocks.sub_block),
    _keep(keep_ref, lambda ref, j, head: ref[head, :, blocks.queries(j)]),
    (dq_ref, dkeys, dvalues, dscale_ref),
    lambda head, ds: None,
    normalize=normalize,
  )

  @pl.when(i == pl.num_programs(2) - 1)
  def _():
    # Normalized queries were multiplied by log2(e) before their products with
    # keys.
    factor = 1 / LOG2E if normalize else 1
    dk_ref[0] = (dkeys[...] * factor).astype(dk_ref.dtype)
    dv_ref[0] = dvalues[...].astype(dv_ref.dtype)


def _keep(keep_ref, read):
  """Returns a function (j, head) -> dropout factors, or None without dropout.

  Args:
    keep_ref: a list of one reference; empty without dropout.
    read: function (reference, j, head) -> dropout factors of sub-block j.
  """
  return functools.partial(read, keep_ref[0]) if keep_ref else None
