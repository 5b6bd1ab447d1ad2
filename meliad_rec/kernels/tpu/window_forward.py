"""Windowed attention on a TPU: the forward kernel.

If the norms of queries and keys give an upper bound of the logits, the softmax
computes no maximum: the bound is subtracted in advance, from the tile of bias
and band that is added to the logits. Otherwise the maximum of each query's
logits is subtracted. Letters as in tpu/blocks.py, the band as in
kernels/blocks.py.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from meliad_rec.kernels.blocks import AB_T
from meliad_rec.kernels.blocks import dot
from meliad_rec.kernels.blocks import LOG2E
from meliad_rec.kernels.reference import MASKED
from meliad_rec.kernels.tpu.blocks import heads_per_step
from meliad_rec.kernels.tpu.blocks import l2_normalize_rows
from meliad_rec.kernels.tpu.blocks import reciprocal
from meliad_rec.kernels.tpu.blocks import to_row
from meliad_rec.kernels.tpu.blocks import vmem_limit
from meliad_rec.kernels.tpu.blocks import WindowBlocks


def forward(
  q_BTF,
  own,
  past,
  tile_HSX,
  scale_H,
  shift_H,
  keep_HSX,
  *,
  block,
  head_dim,
  normalize_own,
  is_bounded,
  interpret,
):
  """Returns outputs, and logarithms of each query's sum of exponentials.

  Args:
    q_BTF: queries, the heads merged.
    own: keys and values of the T tokens of the queries, with merged heads; and
      an array [B, 1, T], MASKED at keys that no query may see, and 0 elsewhere.
    past: the same of the W tokens before; None if there are none.
    tile_HSX: sum of bias and band, minus the shift, to base 2, for a sub-block
      of S queries and the X = W + S keys that they see.
    scale_H: scale of each head, by which L2-normalized queries are multiplied.
      None means that the queries are already scaled.
    shift_H: the shift, to base 2: the upper bound that was subtracted from the
      tile, or 0.
    keep_HSX: dropout factors of a sub-block's probabilities; None means that
      all are 1.
    block: number of queries in a grid step; it divides T and W.
    head_dim: width K of a head.
    normalize_own: whether to L2-normalize the own keys.
    is_bounded: whether the shift is an upper bound; no maximum is then
      computed.
    interpret: see window_attention.attend.

  Returns:
    Outputs [B, T, H K], and logarithms to base 2, [B, H, T] float32. Both are 0
    for a query that sees no key.
  """
  (B, T, F), (H, S, X) = q_BTF.shape, tile_HSX.shape
  K, W, Q = head_dim, X - S, block
  k_BTF, v_BTF, seen_B1T = own
  sharing = F // k_BTF.shape[2]
  G = heads_per_step(H, K, sharing, W)
  blocks = WindowBlocks(Q, K, G, sharing, S, W)
  query_spec = pl.BlockSpec((1, Q, blocks.width), lambda h, b, i: (b, i, h))
  width, kv_group = blocks.kv_width, blocks.kv_group
  own_spec = pl.BlockSpec((1, Q, width), lambda h, b, i: (b, i, kv_group(h)))
  head_spec = lambda a: pl.BlockSpec(
    (G, *a.shape[1:]), lambda h, b, i: (h,) + (0,) * (a.ndim - 1)
  )
  normalize = scale_H is not None
  scalars_H12 = pack_scalars(scale_H if normalize else jnp.ones(H), shift_H)
  arguments = [q_BTF, k_BTF, v_BTF, seen_B1T, scalars_H12, tile_HSX]
  specs = [
    query_spec,
    own_spec,
    own_spec,
    pl.BlockSpec((1, 1, Q), lambda h, b, i: (b, 0, i)),
    head_spec(scalars_H12),
    head_spec(tile_HSX),
  ]
  if past:
    arguments += past
    specs += past_specs(W, width, kv_group)
  if keep_HSX is not None:
    arguments.append(keep_HSX)
    specs.append(head_spec(keep_HSX))
  lse = jax.ShapeDtypeStruct((B, H // G, G, T), jnp.float32)
  scratch = [
    ((W + Q, width), k_BTF.dtype),
    ((W + Q, width), v_BTF.dtype),
    ((1, W + Q), jnp.float32),
  ]
  vmem_blocks = [
    (spec.block_shape, a.dtype)
    for spec, a in zip([*specs, query_spec], [*arguments, q_BTF], strict=True)
  ]
  o_BTF, lse_BNGT = pl.pallas_call(
    functools.partial(
      _kernel,
      blocks=blocks,
      has_past=past is not None,
      normalize=normalize,
      normalize_own=normalize_own,
      is_bounded=is_bounded,
    ),
    grid=(H // G, B, T // Q),
    in_specs=specs,
    out_specs=[
      query_spec,
      pl.BlockSpec((1, 1, G, Q), lambda h, b, i: (b, h, 0, i)),
    ],
    out_shape=[jax.ShapeDtypeStruct(q_BTF.shape, v_BTF.dtype), lse],
    scratch_shapes=[pltpu.VMEM(*each) for each in scratch],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary', 'arbitrary'),
      vmem_limit_bytes=vmem_limit(vmem_blocks, scratch, 16 * S * X * 4),
    ),
    cost_estimate=pl.CostEstimate(
      flops=4 * B * T * F * X,
      transcendentals=B * H * T * X,
      bytes_accessed=2 * (q_BTF.nbytes + k_BTF.nbytes),
    ),
    interpret=interpret,
    name=f'window_attention_forward_{"bounded" if is_bounded else "maximum"}',
  )(*arguments)
  return o_BTF, lse_BNGT.reshape(B, H, T)


def past_specs(W: int, width: int, kv_group) -> list[pl.BlockSpec]:
  """Returns how keys, values and mask of W past tokens are read: at once.

  VMEM holds them once, unlike other blocks, since many grid steps read the same
  ones. Otherwise, a v4 has too little VMEM for the sizes of Hutchins et al.
  2022.

  Args:
    W: number of past tokens.
    width: number of columns of keys that a grid step reads.
    kv_group: function of a step's first index -> the group of these columns.
  """
  keys = pl.BlockSpec(
    (1, W, width),
    lambda h, b, i: (b, 0, kv_group(h)),
    pipeline_mode=pl.Buffered(1),
  )
  return [keys, keys, pl.BlockSpec((1, 1, W), lambda h, b, i: (b, 0, 0))]


def pack_scalars(*scalars_H):
  """Stacks n arrays [H] of scalars for a kernel: [H, 1, n] float32."""
  return jnp.stack(scalars_H, -1)[:, None].astype(jnp.float32)


def _kernel(
  q_ref,
  k_ref,
  v_ref,
  seen_ref,
  scalars_ref,
  tile_ref,
  *rest,
  blocks,
  has_past,
  normalize,
  normalize_own,
  is_bounded,
):
  # The rest: optional inputs, outputs, scratch.
  *rest, o_ref, lse_ref, keys, values, seen = rest
  past, keep_ref = (rest[:3], rest[3:]) if has_past else (None, rest)
  W, Q = blocks.window, blocks.block

  is_first = pl.program_id(2) == 0
  for l, buffer in enumerate((keys, values)):
    zeros = jnp.zeros((W, blocks.kv_width), buffer.dtype)
    buffer[:W] = jnp.where(is_first, past[l][0] if past else zeros, buffer[Q:])
  masked = jnp.full((1, W), MASKED, seen.dtype)
  seen[:, :W] = jnp.where(is_first, past[2][0] if past else masked, seen[:, Q:])
  values[W:], seen[:, W:] = v_ref[0], seen_ref[0]

  write_outputs(
    blocks,
    q_ref,
    load_own_keys(blocks, k_ref, keys, normalize_own),
    values,
    scalars_ref,
    lambda j, head: tile_ref[head] + seen[:, blocks.seen(j)],
    (lambda j, head: keep_ref[0][head]) if keep_ref else None,
    o_ref,
    lse_ref,
    normalize=normalize,
    is_bounded=is_bounded,
  )


def load_own_keys(blocks, k_ref, keys, normalize_own: bool):
  """Copies a block's own keys into `keys`, after the W keys before the block.

  If own keys are to be normalized, those of a sub-block are copied and
  normalized only when the returned function is called for the sub-block, so
  that this overlaps with matrix products.

  Args:
    blocks: sizes of the blocks.
    k_ref: reference to the own keys.
    keys: scratch memory for all keys that the block sees.
    normalize_own: whether to L2-normalize the own keys.

  Returns:
    A function (j, head) -> the keys that sub-block j sees.
  """
  if not normalize_own:
    keys[blocks.window :] = k_ref[0]
    return functools.partial(blocks.read, keys)

  def read(j, head):
    if blocks.is_first_reader(head):
      columns = blocks.kv_columns(head)
      k, _ = l2_normalize_rows(k_ref[0, blocks.queries(j), columns])
      keys[blocks.own(j), columns] = k.astype(keys.dtype)
    return blocks.read(keys, j, head)

  return read


def write_outputs(
  blocks,
  q_ref,
  keys,
  values,
  scalars_ref,
  added,
  keep,
  o_ref,
  lse_ref,
  *,
  normalize,
  is_bounded,
):
  """Writes outputs, and logarithms to base 2 of sums, for a block of queries.

  Args:
    blocks: sizes of the blocks.
    q_ref: reference to the queries.
    keys: function (j, head) -> the keys that sub-block j sees.
    values: reference to all values that the queries see.
    scalars_ref: reference to the scale and shift of each head.
    added: function (j, head) -> what is added to logits of sub-block j, to
      base 2.
    keep: function (j, head) -> dropout factors of sub-block j's probabilities;
      None means that all are 1.
    o_ref, lse_ref: references to which the outputs, and the logarithms of sums
      of exponentials, are written.
    normalize: whether to L2-normalize and scale the queries.
    is_bounded: see `forward`.
  """
  dtype = q_ref.dtype

  def logits(j, head):
    q = q_ref[0, blocks.queries(j), blocks.columns(head)]
    if normalize:
      q = (l2_normalize_rows(q)[0] * (scalars_ref[head, :, :1] * LOG2E)).astype(
        dtype
      )
    s = dot(q, keys(j, head), AB_T)
    if not normalize:
      s = s * LOG2E
    return s + added(j, head)

  def output(j, head, s):
    rows = blocks.queries(j)
    if not is_bounded:
      # The floor keeps the exponentials of a row without keys at 0.
      top = jnp.maximum(jnp.max(s, 1, keepdims=True), MASKED / 2)
      s = s - top
    p = jnp.exp2(s)
    total = jnp.sum(p, 1, keepdims=True)
    if keep:
      p = p * keep(j, head)
    o = dot(p.astype(values.dtype), blocks.read(values, j, head))
    inverse = reciprocal(jnp.maximum(total, 1e-37), o_ref.dtype)
    o_ref[0, rows, blocks.columns(head)] = (o * inverse).astype(o_ref.dtype)
    total = to_row(total)
    lse = jnp.log2(jnp.where(total > 0, total, 1)) + scalars_ref[head, :, 1:2]
    if not is_bounded:
      lse += to_row(top)
    lse_ref[0, 0, head : head + 1, rows] = jnp.where(total > 0, lse, 0)

  blocks.for_sub_blocks(logits, output)
