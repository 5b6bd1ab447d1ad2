"""Windowed attention on a TPU, backward: all gradients in one kernel.

Logits are made again, transposed: [X, S], keys by queries. What belongs to a
query is then a row, and of five products only that of the queries' gradient has
a transposed operand. Gradients of keys are added up in VMEM until the last
block that sees them is done (see tpu_blocks).
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from meliad_rec.kernels.blocks import A_TB
from meliad_rec.kernels.blocks import AB_T
from meliad_rec.kernels.blocks import dot
from meliad_rec.kernels.blocks import LOG2E
from meliad_rec.kernels.reference import NEVER
from meliad_rec.kernels.tpu.blocks import across
from meliad_rec.kernels.tpu.blocks import as_column
from meliad_rec.kernels.tpu.blocks import backward_heads
from meliad_rec.kernels.tpu.blocks import bytes_needed
from meliad_rec.kernels.tpu.blocks import LANES
from meliad_rec.kernels.tpu.blocks import unit
from meliad_rec.kernels.tpu.blocks import WindowBlocks
from meliad_rec.kernels.tpu.window_forward import pack
from meliad_rec.kernels.tpu.window_forward import taken_keys


def backward(
  q_BTF,
  k_BSF,
  v_BSF,
  seen_B1S,
  tile_HXS,
  scale_H,
  keep_HXS,
  o_BTF,
  lse_BHT,
  do_BTF,
  *,
  block,
  head_dim,
  normalize_own,
  interpret,
):
  """Gradients, from that of the outputs.

  Args:
    q_BTF, k_BSF, v_BSF, seen_B1S, scale_H, block, head_dim, normalize_own,
      interpret: see tpu_forward.forward.
    tile_HXS: bias and band of a sub-block, to base 2, not lowered; transposed.
    keep_HXS: factors of the probabilities, for dropout; None: all 1.
    o_BTF, lse_BHT: what forward returned.
    do_BTF: gradient of the outputs.

  Returns:
    Those of q_BTF, k_BSF, v_BSF; of the bias, [H, X, S] float32; of scale_H,
    or 0 where it is None.
  """
  (B, T, F), (H, X, S) = q_BTF.shape, tile_HXS.shape
  K, W, Q = head_dim, X - S, block
  sharing = F // k_BSF.shape[2]
  G = backward_heads(H, K, sharing, W, Q, q_BTF.dtype.itemsize)
  blocks = WindowBlocks(Q, K, G, sharing, S, W)
  last = T // Q - 1
  width, key_group = blocks.key_width, blocks.key_group
  ahead = (k_BSF.shape[1] - T) // Q  # Blocks of the past.
  later = W // Q  # Blocks of queries that see a block of keys, but its own.
  now = lambda i: jnp.minimum(i, last)
  here = pl.BlockSpec((1, Q, blocks.width), lambda h, b, i: (b, now(i), h))
  own = pl.BlockSpec(
    (1, Q, width), lambda h, b, i: (b, now(i) + ahead, key_group(h))
  )
  past = pl.BlockSpec((1, W, width), lambda h, b, i: (b, 0, key_group(h)))
  done = lambda group: pl.BlockSpec(
    (1, Q, width),
    lambda h, b, i: (b, jnp.maximum(i + ahead - later, 0), group(h)),
  )
  of_heads = lambda a: pl.BlockSpec(
    (G, *a.shape[1:]), lambda h, b, i: (h,) + (0,) * (a.ndim - 1)
  )
  normalize = scale_H is not None
  scalars_H11 = pack(scale_H if normalize else jnp.ones(H))
  arguments = [q_BTF, do_BTF, o_BTF, k_BSF, v_BSF, seen_B1S]
  arguments += [lse_BHT.reshape(B, H // G, G, T), scalars_H11, tile_HXS]
  specs = [here, here, here, own, own]
  specs += [
    pl.BlockSpec((1, 1, Q), lambda h, b, i: (b, 0, now(i) + ahead)),
    pl.BlockSpec((1, 1, G, Q), lambda h, b, i: (b, h, 0, now(i))),
    of_heads(scalars_H11),
    of_heads(tile_HXS),
  ]
  if ahead:
    arguments += [k_BSF, v_BSF, seen_B1S]
    specs += [past, past, pl.BlockSpec((1, 1, W), lambda h, b, i: (b, 0, 0))]
  if keep_HXS is not None:
    arguments.append(keep_HXS)
    specs.append(of_heads(keep_HXS))
  if normalize_own:
    arguments.append(k_BSF)
    specs.append(done(key_group))
  shape = jax.ShapeDtypeStruct
  # Key heads shared by several steps have a gradient of each of them.
  dk = shape((B, k_BSF.shape[1], H // G * width), k_BSF.dtype)
  tile, scalars = (shape(a.shape, jnp.float32) for a in (tile_HXS, scalars_H11))
  scratch = [
    ((W + Q, width), k_BSF.dtype),
    ((W + Q, width), v_BSF.dtype),
    ((W + Q, LANES), jnp.float32),
    ((W + Q, width), jnp.float32),
    ((W + Q, width), jnp.float32),
  ]
  done = done(lambda h: h)
  written = [here, done, done, of_heads(tile), of_heads(scalars)]
  results = [shape(q_BTF.shape, q_BTF.dtype), dk, dk, tile, scalars]
  moved = [
    (spec.block_shape, a.dtype)
    for spec, a in zip([*specs, *written], [*arguments, *results], strict=True)
  ]
  dq_BTF, dk_BSF, dv_BSF, dbias_HXS, dscale_H11 = pl.pallas_call(
    functools.partial(
      _kernel,
      blocks=blocks,
      has_past=ahead > 0,
      later=later,
      normalize=normalize,
      normalize_own=normalize_own,
    ),
    grid=(H // G, B, T // Q + later),
    in_specs=specs,
    out_specs=written,
    out_shape=results,
    scratch_shapes=[pltpu.VMEM(*each) for each in scratch],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary', 'arbitrary'),
      vmem_limit_bytes=bytes_needed(moved, scratch, 24 * S * X * 4),
    ),
    cost_estimate=pl.CostEstimate(
      flops=10 * B * T * F * X,
      transcendentals=B * H * T * X,
      bytes_accessed=4 * (q_BTF.nbytes + k_BSF.nbytes),
    ),
    interpret=interpret,
    name='window_attention_backward',
  )(*arguments)
  dk_BSF, dv_BSF = (of_key_heads(a, k_BSF, width) for a in (dk_BSF, dv_BSF))
  return dq_BTF, dk_BSF, dv_BSF, dbias_HXS, dscale_H11[:, 0, 0]


def of_key_heads(parts_BSF, k_BSF, width: int):
  """Gradients like k_BSF, from those of each step that read a key head."""
  if parts_BSF.shape == k_BSF.shape:
    return parts_BSF
  parts = parts_BSF.shape[2] // k_BSF.shape[2]
  apart = parts_BSF.reshape(*k_BSF.shape[:2], -1, parts, width)
  total = jnp.sum(apart, 3, dtype=jnp.float32)
  return total.reshape(k_BSF.shape).astype(k_BSF.dtype)


def _kernel(
  q_ref,
  do_ref,
  o_ref,
  k_ref,
  v_ref,
  seen_ref,
  lse_ref,
  scalars_ref,
  tile_ref,
  *rest,
  blocks,
  has_past,
  later,
  normalize,
  normalize_own,
):
  *rest, keys, values, seen, dkeys, dvalues = rest
  *rest, dq_ref, dk_ref, dv_ref, dbias_ref, dscale_ref = rest
  *rest, done_ref = rest if normalize_own else (*rest, None)
  past, keep_ref = (rest[:3], rest[3:]) if has_past else (None, rest)
  W, Q = blocks.window, blocks.block
  i = pl.program_id(2)

  @pl.when((i == 0) & (pl.program_id(1) == 0))
  def _():
    for sums in (dbias_ref, dscale_ref):
      sums[...] = jnp.zeros(sums.shape)

  for sums in (dkeys, dvalues):
    sums[:W] = jnp.where(i == 0, 0, sums[Q:])

  def add_to_bias(head, ds):
    dbias_ref[head] += ds

  @pl.when(i < pl.num_programs(2) - later)
  def _():
    never = jnp.full((W, LANES), NEVER, seen.dtype)
    before = as_column(past[2][0]) if past else never
    seen[:W] = jnp.where(i == 0, before, seen[Q:])
    for l, buffer in enumerate((keys, values)):
      zeros = jnp.zeros((W, blocks.key_width), buffer.dtype)
      buffer[:W] = jnp.where(i == 0, past[l][0] if past else zeros, buffer[Q:])
    values[W:] = v_ref[0]
    seen[W:] = as_column(seen_ref[0])
    for sums in (dkeys, dvalues):
      sums[W:] = jnp.zeros((Q, blocks.key_width))
    add_gradients(
      blocks,
      (q_ref, do_ref, o_ref, lse_ref, scalars_ref),
      (taken_keys(blocks, k_ref, keys, normalize_own), keys, values),
      lambda j, head: (
        tile_ref[head] + across(seen[blocks.seen(j)], blocks.sub_block)
      ),
      (lambda j, head: keep_ref[0][head]) if keep_ref else None,
      (dq_ref, dkeys, dvalues, dscale_ref),
      add_to_bias,
      normalize=normalize,
    )

  dv_ref[0] = dvalues[:Q].astype(dv_ref.dtype)
  # With unit queries, those that keys met were taken to base 2.
  factor = 1 / LOG2E if normalize else 1
  if not normalize_own:
    dk_ref[0] = (dkeys[:Q] * factor).astype(dk_ref.dtype)
    return
  for head in range(blocks.num_kv_heads):
    columns = blocks.columns(head)
    dk = dkeys[:Q, columns]
    along, shrunk = unit(done_ref[0][:, columns])
    # Keys of the past were of unit length as they came.
    is_raw = i >= later
    dk -= along * jnp.where(is_raw, jnp.sum(dk * along, 1, keepdims=True), 0)
    dk *= jnp.where(is_raw, shrunk, 1) * factor
    dk_ref[0, :, columns] = dk.astype(dk_ref.dtype)


def add_gradients(
  blocks, of_queries, of_keys, added, keep, sums, add_to_bias, *, normalize
):
  """Gradients of one block of queries, and of the keys that it sees.

  Args:
    blocks, normalize: of the kernel.
    of_queries: references to queries, gradients of outputs, outputs, logarithms
      of sums, and scalars.
    of_keys: (j, head) -> keys that a sub-block sees, called first; all keys
      that the queries see; and all values.
    added: (j, head) -> what is added to logits of a sub-block, to base 2.
    keep: (j, head) -> factors of its probabilities; None: all 1.
    sums: references to gradients: that of queries is written, those of keys, of
      values and of scales are added to.
    add_to_bias: (head, gradient of logits) -> nothing.
  """
  q_ref, do_ref, o_ref, lse_ref, scalars_ref = of_queries
  seen_keys, keys, values = of_keys
  dq_ref, dkeys, dvalues, dscale_ref = sums
  dtype = q_ref.dtype

  def logits(j, head):
    rows, columns = blocks.queries(j), blocks.columns(head)
    scale = scalars_ref[head, :, :1]
    q, do = q_ref[0, rows, columns], do_ref[0, rows, columns]
    along = factor = None
    if normalize:
      along, factor = unit(q)
      q = (along * (scale * LOG2E)).astype(dtype)
    s = dot(seen_keys(j, head), q, AB_T)
    if not normalize:
      s = s * LOG2E
    s = s + added(j, head) - lse_ref[0, 0, head : head + 1, rows]
    o = o_ref[0, rows, columns].astype(jnp.float32)
    mean = jnp.sum((do.astype(jnp.float32) * o).T, 0, keepdims=True)
    dp = dot(blocks.read(values, j, head), do, AB_T)
    return s, dp, mean, q, do, along, factor

  def gradients(j, head, ahead):
    s, dp, mean, q, do, along, factor = ahead
    rows, columns = blocks.queries(j), blocks.columns(head)
    near, key_columns = blocks.seen(j), blocks.key_columns(head)
    p = jnp.exp2(s)
    kept = p * keep(j, head) if keep else p
    dvalues[near, key_columns] += dot(kept.astype(dtype), do)
    ds = kept * dp - p * mean if keep else p * (dp - mean)
    add_to_bias(head, ds)
    ds = ds.astype(dtype)
    dkeys[near, key_columns] += dot(ds, q)
    dq = dot(ds, blocks.read(keys, j, head), A_TB)
    if normalize:
      radial = jnp.sum(dq * along, 1, keepdims=True)
      dscale_ref[head, :, :1] += jnp.sum(radial, 0, keepdims=True)
      dq = (dq - along * radial) * (factor * scalars_ref[head, :, :1])
    dq_ref[0, rows, columns] = dq.astype(dq_ref.dtype)

  blocks.sub_blocks(logits, gradients)
