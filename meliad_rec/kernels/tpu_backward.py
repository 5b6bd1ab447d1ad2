"""Windowed attention on a TPU, backward: all gradients in one kernel.

Logits are made again, transposed: [X, S], keys by queries. What belongs to a
query is then a row, and of five products only that of the queries' gradient has
a transposed operand. Gradients of keys are added up in VMEM until the block
after theirs is done (see tpu_blocks).
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
from meliad_rec.kernels.tpu_blocks import across
from meliad_rec.kernels.tpu_blocks import as_column
from meliad_rec.kernels.tpu_blocks import Blocks
from meliad_rec.kernels.tpu_blocks import bytes_needed
from meliad_rec.kernels.tpu_blocks import heads_of_step
from meliad_rec.kernels.tpu_blocks import LANES
from meliad_rec.kernels.tpu_blocks import unit
from meliad_rec.kernels.tpu_forward import pack
from meliad_rec.kernels.window_attention_ref import NEVER


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
  head_width,
  interpret,
):
  """Gradients, from that of the outputs.

  Args:
    q_BTF, k_BSF, v_BSF, seen_B1S, scale_H, head_width, interpret: see
      tpu_forward.forward.
    tile_HXS: bias and band of a sub-block, to base 2, not lowered; transposed.
    keep_HXS: factors of the probabilities, for dropout; None: all 1.
    o_BTF, lse_BHT: what forward returned.
    do_BTF: gradient of the outputs.

  Returns:
    Those of q_BTF, k_BSF, v_BSF; of the bias, [H, X, S] float32; of scale_H,
    or 0 where it is None.
  """
  (B, T, F), (H, X, S) = q_BTF.shape, tile_HXS.shape
  K, W = head_width, X - S
  sharing = F // k_BSF.shape[2]
  G = heads_of_step(H, K, sharing, W, 2)
  blocks = Blocks(W, K, G, sharing, S)
  last = T // W - 1
  width, key_group = blocks.key_width, blocks.key_group
  ahead = (k_BSF.shape[1] - T) // W  # Blocks of the past.
  now = lambda i: jnp.minimum(i, last)
  here = pl.BlockSpec((1, W, blocks.width), lambda h, b, i: (b, now(i), h))
  own = pl.BlockSpec(
    (1, W, width), lambda h, b, i: (b, now(i) + ahead, key_group(h))
  )
  past = pl.BlockSpec((1, W, width), lambda h, b, i: (b, 0, key_group(h)))
  # A block of keys is done with the queries of the block after it.
  done = pl.BlockSpec(
    (1, W, width), lambda h, b, i: (b, jnp.maximum(i + ahead - 1, 0), h)
  )
  of_heads = lambda a: pl.BlockSpec(
    (G, *a.shape[1:]), lambda h, b, i: (h,) + (0,) * (a.ndim - 1)
  )
  normalize = scale_H is not None
  scalars_H11 = pack(scale_H if normalize else jnp.ones(H))
  arguments = [q_BTF, k_BSF, v_BSF, k_BSF, v_BSF, do_BTF, o_BTF]
  arguments += [seen_B1S, seen_B1S, lse_BHT.reshape(B, H // G, G, T)]
  arguments += [scalars_H11, tile_HXS]
  specs = [here, own, own, past, past, here, here]
  specs += [
    pl.BlockSpec((1, 1, W), lambda h, b, i: (b, 0, now(i) + ahead)),
    pl.BlockSpec((1, 1, W), lambda h, b, i: (b, 0, 0)),
    pl.BlockSpec((1, 1, G, W), lambda h, b, i: (b, h, 0, now(i))),
    of_heads(scalars_H11),
    of_heads(tile_HXS),
  ]
  if keep_HXS is not None:
    arguments.append(keep_HXS)
    specs.append(of_heads(keep_HXS))
  shape = jax.ShapeDtypeStruct
  # Key heads shared by several steps have a gradient of each of them.
  dk = shape((B, k_BSF.shape[1], H // G * width), k_BSF.dtype)
  tile, scalars = (shape(a.shape, jnp.float32) for a in arguments[11:9:-1])
  scratch = [
    ((2 * W, width), k_BSF.dtype),
    ((2 * W, width), v_BSF.dtype),
    ((2 * W, LANES), jnp.float32),
    ((2 * W, width), jnp.float32),
    ((2 * W, width), jnp.float32),
  ]
  moved = [(s.block_shape, jnp.float32) for s in [*specs[7:], specs[11]]]
  moved += [(s.block_shape, q_BTF.dtype) for s in [*specs[:7], here, own, own]]
  dq_BTF, dk_BSF, dv_BSF, dbias_HXS, dscale_H11 = pl.pallas_call(
    functools.partial(
      _kernel, blocks=blocks, has_past=ahead > 0, normalize=normalize
    ),
    grid=(H // G, B, T // W + 1),
    in_specs=specs,
    out_specs=[here, done, done, of_heads(tile), of_heads(scalars)],
    out_shape=[shape(q_BTF.shape, q_BTF.dtype), dk, dk, tile, scalars],
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
  k_ref,
  v_ref,
  past_k_ref,
  past_v_ref,
  do_ref,
  o_ref,
  seen_ref,
  past_seen_ref,
  lse_ref,
  scalars_ref,
  tile_ref,
  *rest,
  blocks,
  has_past,
  normalize,
):
  *keep_ref, dq_ref, dk_ref, dv_ref, dbias_ref, dscale_ref = rest[:-5]
  keys, values, seen, dkeys, dvalues = rest[-5:]
  W = blocks.window
  i = pl.program_id(2)

  def take(k_ref, v_ref, seen_ref):
    keys[W:], values[W:] = k_ref[0], v_ref[0]
    seen[W:] = as_column(seen_ref[0])
    for sums in (dkeys, dvalues):
      sums[W:] = jnp.zeros_like(sums[W:])

  @pl.when(i == 0)
  def _():
    take(past_k_ref, past_v_ref, past_seen_ref)
    if not has_past:
      seen[W:] = jnp.full((W, LANES), NEVER, seen.dtype)

  @pl.when((i == 0) & (pl.program_id(1) == 0))
  def _():
    for sums in (dbias_ref, dscale_ref):
      sums[...] = jnp.zeros(sums.shape)

  for buffer in (dkeys, dvalues):
    buffer[:W] = buffer[W:]

  def add_to_bias(head, ds):
    dbias_ref[head] += ds

  @pl.when(i < pl.num_programs(2) - 1)
  def _():
    for buffer in (keys, values, seen):
      buffer[:W] = buffer[W:]
    take(k_ref, v_ref, seen_ref)
    add_gradients(
      blocks,
      (q_ref, do_ref, o_ref, lse_ref, scalars_ref),
      (keys, values),
      lambda j, head: (
        tile_ref[head] + across(seen[blocks.seen(j)], blocks.sub_block)
      ),
      (lambda j, head: keep_ref[0][head]) if keep_ref else None,
      (dq_ref, dkeys, dvalues, dscale_ref),
      add_to_bias,
      normalize=normalize,
    )

  dv_ref[0] = dvalues[:W].astype(dv_ref.dtype)
  # With unit queries, those that keys met were taken to base 2.
  factor = 1 / LOG2E if normalize else 1
  dk_ref[0] = (dkeys[:W] * factor).astype(dk_ref.dtype)


def add_gradients(
  blocks, of_queries, of_keys, added, keep, sums, add_to_bias, *, normalize
):
  """Gradients of one block of queries, and of the keys that it sees.

  Args:
    blocks, normalize: of the kernel.
    of_queries: references to queries, gradients of outputs, outputs, logarithms
      of sums, and scalars.
    of_keys: keys and values, all that the queries see.
    added: (j, head) -> what is added to logits of a sub-block, to base 2.
    keep: (j, head) -> factors of its probabilities; None: all 1.
    sums: references to gradients: that of queries is written, those of keys, of
      values and of scales are added to.
    add_to_bias: (head, gradient of logits) -> nothing.
  """
  q_ref, do_ref, o_ref, lse_ref, scalars_ref = of_queries
  keys, values = of_keys
  dq_ref, dkeys, dvalues, dscale_ref = sums
  dtype = q_ref.dtype

  def logits(j, head):
    rows, columns = blocks.queries(j), blocks.columns(head)
    near, key_columns = blocks.seen(j), blocks.key_columns(head)
    scale = scalars_ref[head, :, :1]
    q, do = q_ref[0, rows, columns], do_ref[0, rows, columns]
    along = factor = None
    if normalize:
      along, factor = unit(q)
      q = (along * (scale * LOG2E)).astype(dtype)
    s = dot(keys[near, key_columns], q, AB_T)
    if not normalize:
      s = s * LOG2E
    s = s + added(j, head) - lse_ref[0, 0, head : head + 1, rows]
    o = o_ref[0, rows, columns].astype(jnp.float32)
    mean = jnp.sum((do.astype(jnp.float32) * o).T, 0, keepdims=True)
    dp = dot(values[near, key_columns], do, AB_T)
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
    dq = dot(ds, keys[near, key_columns], A_TB)
    if normalize:
      radial = jnp.sum(dq * along, 1, keepdims=True)
      dscale_ref[head, :, :1] += jnp.sum(radial, 0, keepdims=True)
      dq = (dq - along * radial) * (factor * scalars_ref[head, :, :1])
    dq_ref[0, rows, columns] = dq.astype(dq_ref.dtype)

  blocks.sub_blocks(logits, gradients)
