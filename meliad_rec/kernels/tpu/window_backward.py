"""Windowed attention on a TPU: the backward kernel, for all gradients.

Logits are recomputed transposed, [X, S], keys by queries. Quantities with one
number per query, such as sums of exponentials, then form a row. Of the five
matrix products, only the one for gradients of queries transposes its first
operand. Gradients of keys are summed in VMEM until the last block of queries
that sees the keys. Letters as in tpu/blocks.py.
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
from meliad_rec.kernels.reference import MASKED
from meliad_rec.kernels.tpu.blocks import backward_heads
from meliad_rec.kernels.tpu.blocks import l2_normalize_rows
from meliad_rec.kernels.tpu.blocks import LANES
from meliad_rec.kernels.tpu.blocks import to_columns
from meliad_rec.kernels.tpu.blocks import vmem_limit
from meliad_rec.kernels.tpu.blocks import widen
from meliad_rec.kernels.tpu.blocks import WindowBlocks
from meliad_rec.kernels.tpu.window_forward import load_own_keys
from meliad_rec.kernels.tpu.window_forward import pack_scalars
from meliad_rec.kernels.tpu.window_forward import past_specs


def backward(
  q_BTF,
  own,
  past,
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
  """Returns gradients of the inputs, given gradients of the outputs.

  Args:
    q_BTF, own, past, scale_H, block, head_dim, normalize_own, interpret: see
      window_forward.forward.
    tile_HXS: sum of bias and band, to base 2, for the X keys that a sub-block
      of S queries sees. No shift is subtracted.
    keep_HXS: dropout factors of a sub-block's probabilities; None means that
      all are 1.
    o_BTF, lse_BHT: results of window_forward.forward.
    do_BTF: gradients of the outputs.

  Returns:
    Gradients of q_BTF; of own keys and values, a list of two; of past keys and
    values, a list of two, or [] if there are none; of the tile before its
    conversion to base 2, [H, X, S] float32; and of scale_H, zeros [H] if it is
    None.
  """
  (B, T, F), (H, X, S) = q_BTF.shape, tile_HXS.shape
  K, W, Q = head_dim, X - S, block
  k_BTF, v_BTF, seen_B1T = own
  sharing = F // k_BTF.shape[2]
  G = backward_heads(H, K, sharing, W, Q, q_BTF.dtype.itemsize)
  blocks = WindowBlocks(Q, K, G, sharing, S, W)
  width, kv_group = blocks.kv_width, blocks.kv_group
  # Steps after the last block of queries finish the keys of the last window.
  window_blocks = W // Q
  query_block = lambda i: jnp.minimum(i, T // Q - 1)
  query_spec = pl.BlockSpec(
    (1, Q, blocks.width), lambda h, b, i: (b, query_block(i), h)
  )
  own_spec = pl.BlockSpec(
    (1, Q, width), lambda h, b, i: (b, query_block(i), kv_group(h))
  )
  finished_spec = lambda group: pl.BlockSpec(
    (1, Q, width),
    lambda h, b, i: (b, jnp.maximum(i - window_blocks, 0), group(h)),
  )
  finished_past_spec = pl.BlockSpec(
    (1, Q, width), lambda h, b, i: (b, jnp.minimum(i, window_blocks - 1), h)
  )
  head_spec = lambda a: pl.BlockSpec(
    (G, *a.shape[1:]), lambda h, b, i: (h,) + (0,) * (a.ndim - 1)
  )
  normalize = scale_H is not None
  scalars_H11 = pack_scalars(scale_H if normalize else jnp.ones(H))
  arguments = [q_BTF, do_BTF, o_BTF, k_BTF, v_BTF, seen_B1T]
  arguments += [lse_BHT.reshape(B, H // G, G, T), scalars_H11, tile_HXS]
  specs = [query_spec, query_spec, query_spec, own_spec, own_spec]
  specs += [
    pl.BlockSpec((1, 1, Q), lambda h, b, i: (b, 0, query_block(i))),
    pl.BlockSpec((1, 1, G, Q), lambda h, b, i: (b, h, 0, query_block(i))),
    head_spec(scalars_H11),
    head_spec(tile_HXS),
  ]
  if past:
    arguments += past
    specs += past_specs(W, width, kv_group)
  if keep_HXS is not None:
    arguments.append(keep_HXS)
    specs.append(head_spec(keep_HXS))
  if normalize_own:
    arguments.append(k_BTF)
    specs.append(finished_spec(kv_group))
  shape = jax.ShapeDtypeStruct
  # Each grid step that shares a key head computes its own gradient of it.
  dk_shape = lambda length: shape((B, length, H // G * width), k_BTF.dtype)
  tile, scalars = (shape(a.shape, jnp.float32) for a in (tile_HXS, scalars_H11))
  scratch = [
    ((W + Q, width), k_BTF.dtype),
    ((W + Q, width), v_BTF.dtype),
    ((W + Q, LANES), jnp.float32),
    ((W + Q, width), jnp.float32),
    ((W + Q, width), jnp.float32),
  ]
  out_specs = [query_spec, head_spec(tile), head_spec(scalars)]
  out_specs += [finished_spec(lambda h: h)] * 2
  out_shapes = [shape(q_BTF.shape, q_BTF.dtype), tile, scalars]
  out_shapes += [dk_shape(T)] * 2
  if past:
    out_specs += [finished_past_spec] * 2
    out_shapes += [dk_shape(W)] * 2
  vmem_blocks = [
    (spec.block_shape, a.dtype)
    for spec, a in zip(
      [*specs, *out_specs], [*arguments, *out_shapes], strict=True
    )
  ]
  dq_BTF, dbias_HXS, dscale_H11, *dkeys = pl.pallas_call(
    functools.partial(
      _kernel,
      blocks=blocks,
      has_past=past is not None,
      window_blocks=window_blocks,
      normalize=normalize,
      normalize_own=normalize_own,
    ),
    grid=(H // G, B, T // Q + window_blocks),
    in_specs=specs,
    out_specs=out_specs,
    out_shape=out_shapes,
    scratch_shapes=[pltpu.VMEM(*each) for each in scratch],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary', 'arbitrary'),
      vmem_limit_bytes=vmem_limit(vmem_blocks, scratch, 24 * S * X * 4),
    ),
    cost_estimate=pl.CostEstimate(
      flops=10 * B * T * F * X,
      transcendentals=B * H * T * X,
      bytes_accessed=4 * (q_BTF.nbytes + k_BTF.nbytes),
    ),
    interpret=interpret,
    name='window_attention_backward',
  )(*arguments)
  dkeys = [sum_shared_heads(a, k_BTF.shape[2], width) for a in dkeys]
  return dq_BTF, dkeys[:2], dkeys[2:], dbias_HXS, dscale_H11[:, 0, 0]


def sum_shared_heads(parts_BSF, columns: int, width: int):
  """Sums the gradients that several grid steps computed for one key head.

  Args:
    parts_BSF: gradients; each step computed one group of `width` columns.
    columns: number of columns of all keys, and of the result.
    width: number of columns that a grid step reads from the keys.
  """
  B, S, F = parts_BSF.shape
  if columns == F:
    return parts_BSF
  split = parts_BSF.reshape(B, S, -1, F // columns, width)
  total = jnp.sum(split, 3, dtype=jnp.float32)
  return total.reshape(B, S, columns).astype(parts_BSF.dtype)


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
  window_blocks,
  normalize,
  normalize_own,
):
  # The rest: optional inputs, outputs, scratch.
  *rest, keys, values, seen, dkeys, dvalues = rest
  if has_past:
    *rest, dk_past_ref, dv_past_ref = rest
  *rest, dq_ref, dbias_ref, dscale_ref, dk_ref, dv_ref = rest
  *rest, finished_keys_ref = rest if normalize_own else (*rest, None)
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

  @pl.when(i < pl.num_programs(2) - window_blocks)
  def _():
    masked = jnp.full((W, LANES), MASKED, seen.dtype)
    before = to_columns(past[2][0]) if past else masked
    seen[:W] = jnp.where(i == 0, before, seen[Q:])
    for l, buffer in enumerate((keys, values)):
      zeros = jnp.zeros((W, blocks.kv_width), buffer.dtype)
      buffer[:W] = jnp.where(i == 0, past[l][0] if past else zeros, buffer[Q:])
    values[W:] = v_ref[0]
    seen[W:] = to_columns(seen_ref[0])
    for sums in (dkeys, dvalues):
      sums[W:] = jnp.zeros((Q, blocks.kv_width))
    add_gradients(
      blocks,
      (q_ref, do_ref, o_ref, lse_ref, scalars_ref),
      (load_own_keys(blocks, k_ref, keys, normalize_own), keys, values),
      lambda j, head: (
        tile_ref[head] + widen(seen[blocks.seen(j)], blocks.sub_block)
      ),
      (lambda j, head: keep_ref[0][head]) if keep_ref else None,
      (dq_ref, dkeys, dvalues, dscale_ref),
      add_to_bias,
      normalize=normalize,
    )

  # Normalized queries were multiplied by log2(e) before the product with keys.
  factor = 1 / LOG2E if normalize else 1

  def write(dk_ref, dv_ref):
    dk_ref[0] = (dkeys[:Q] * factor).astype(dk_ref.dtype)
    dv_ref[0] = dvalues[:Q].astype(dv_ref.dtype)

  if has_past:
    # Past keys were already normalized.
    pl.when(i < window_blocks)(lambda: write(dk_past_ref, dv_past_ref))

  @pl.when(i >= window_blocks)
  def _():
    if not normalize_own:
      write(dk_ref, dv_ref)
      return
    dv_ref[0] = dvalues[:Q].astype(dv_ref.dtype)
    for head in range(blocks.num_kv_heads):
      columns = blocks.columns(head)
      dk = dkeys[:Q, columns]
      unit, shrink = l2_normalize_rows(finished_keys_ref[0][:, columns])
      dk -= unit * jnp.sum(dk * unit, 1, keepdims=True)
      dk_ref[0, :, columns] = (dk * (shrink * factor)).astype(dk_ref.dtype)


def add_gradients(
  blocks, query_refs, key_refs, added, keep, sums, add_to_bias, *, normalize
):
  """Computes gradients for one block of queries and the keys that it sees.

  Args:
    blocks, normalize: see window_forward.write_outputs.
    query_refs: references to queries, gradients of outputs, outputs, logarithms
      of sums of exponentials, and the scale of each head.
    key_refs: a function (j, head) -> the keys that sub-block j sees; a
      reference to all keys that the queries see; and one to all values. The
      function is called before the keys of sub-block j are read from the
      reference.
    added: function (j, head) -> what is added to logits of sub-block j, to
      base 2.
    keep: function (j, head) -> dropout factors of sub-block j's probabilities;
      None means that all are 1.
    sums: references to gradients of queries, keys, values and scales. Those of
      queries are overwritten; the others are increased by the block's share.
    add_to_bias: function of a head and the gradients [X, S] of its logits in a
      sub-block; it is called for each head and sub-block.
  """
  q_ref, do_ref, o_ref, lse_ref, scalars_ref = query_refs
  seen_keys, keys, values = key_refs
  dq_ref, dkeys, dvalues, dscale_ref = sums
  dtype = q_ref.dtype

  def logits(j, head):
    rows, columns = blocks.queries(j), blocks.columns(head)
    scale = scalars_ref[head, :, :1]
    q, do = q_ref[0, rows, columns], do_ref[0, rows, columns]
    unit = factor = None
    if normalize:
      unit, factor = l2_normalize_rows(q)
      q = (unit * (scale * LOG2E)).astype(dtype)
    s = dot(seen_keys(j, head), q, AB_T)
    if not normalize:
      s = s * LOG2E
    s = s + added(j, head) - lse_ref[0, 0, head : head + 1, rows]
    o = o_ref[0, rows, columns].astype(jnp.float32)
    delta = jnp.sum((do.astype(jnp.float32) * o).T, 0, keepdims=True)
    dp = dot(blocks.read(values, j, head), do, AB_T)
    return s, dp, delta, q, do, unit, factor

  def gradients(j, head, ahead):
    s, dp, delta, q, do, unit, factor = ahead
    rows, columns = blocks.queries(j), blocks.columns(head)
    near, kv_columns = blocks.seen(j), blocks.kv_columns(head)
    p = jnp.exp2(s)
    kept = p * keep(j, head) if keep else p
    dvalues[near, kv_columns] += dot(kept.astype(dtype), do)
    ds = kept * dp - p * delta if keep else p * (dp - delta)
    add_to_bias(head, ds)
    ds = ds.astype(dtype)
    dkeys[near, kv_columns] += dot(ds, q)
    dq = dot(ds, blocks.read(keys, j, head), A_TB)
    if normalize:
      radial = jnp.sum(dq * unit, 1, keepdims=True)
      dscale_ref[head, :, :1] += jnp.sum(radial, 0, keepdims=True)
      dq = (dq - unit * radial) * (factor * scalars_ref[head, :, :1])
    dq_ref[0, rows, columns] = dq.astype(dq_ref.dtype)

  blocks.for_sub_blocks(logits, gradients)
