"""Windowed attention on a TPU, forward (see tpu_blocks).

Softmax: where the length of queries and keys bounds the logits, the bound is in
the tile, and no maximum is looked for; elsewhere each row's maximum is.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from meliad_rec.kernels.blocks import AB_T
from meliad_rec.kernels.blocks import dot
from meliad_rec.kernels.blocks import LOG2E
from meliad_rec.kernels.reference import NEVER
from meliad_rec.kernels.tpu.blocks import as_row
from meliad_rec.kernels.tpu.blocks import bytes_needed
from meliad_rec.kernels.tpu.blocks import heads_of_step
from meliad_rec.kernels.tpu.blocks import reciprocal
from meliad_rec.kernels.tpu.blocks import unit
from meliad_rec.kernels.tpu.blocks import WindowBlocks


def forward(
  q_BTF,
  k_BSF,
  v_BSF,
  seen_B1S,
  tile_HSX,
  scale_H,
  shift_H,
  keep_HSX,
  *,
  block,
  head_dim,
  normalize_own,
  bounded,
  interpret,
):
  """Outputs, and logarithms of each query's sum of exponentials.

  Args:
    q_BTF: queries, the heads side by side.
    k_BSF, v_BSF: W keys of the past, or none, then T own ones.
    seen_B1S: 0, or NEVER at keys that nobody may see.
    tile_HSX: bias and band of a sub-block, to base 2, less the shift.
    scale_H: queries are brought to unit length and multiplied with it; None:
      they are as they shall be.
    shift_H: what the tile was lowered by; 0 unless bounded.
    keep_HSX: factors of the probabilities, for dropout; None: all 1.
    block: Q; it divides T and W.
    head_dim: K.
    normalize_own: whether own keys are brought to unit length.
    bounded: whether the tile is so low that no exponential overflows.
    interpret: False, or how to run without a TPU.

  Returns:
    [B, T, H K], and [B, H, T] float32 to base 2.
  """
  (B, T, F), (H, S, X) = q_BTF.shape, tile_HSX.shape
  K, W, Q = head_dim, X - S, block
  sharing = F // k_BSF.shape[2]
  G = heads_of_step(H, K, sharing, W)
  blocks = WindowBlocks(Q, K, G, sharing, S, W)
  here = pl.BlockSpec((1, Q, blocks.width), lambda h, b, i: (b, i, h))
  key_group = blocks.key_group
  width = blocks.key_width
  ahead = (k_BSF.shape[1] - T) // Q  # Blocks of the past.
  own = pl.BlockSpec(
    (1, Q, width), lambda h, b, i: (b, i + ahead, key_group(h))
  )
  past = pl.BlockSpec((1, W, width), lambda h, b, i: (b, 0, key_group(h)))
  of_heads = lambda a: pl.BlockSpec(
    (G, *a.shape[1:]), lambda h, b, i: (h,) + (0,) * (a.ndim - 1)
  )
  normalize = scale_H is not None
  scalars_H12 = pack(scale_H if normalize else jnp.ones(H), shift_H)
  arguments = [q_BTF, k_BSF, v_BSF, seen_B1S, scalars_H12, tile_HSX]
  specs = [
    here,
    own,
    own,
    pl.BlockSpec((1, 1, Q), lambda h, b, i: (b, 0, i + ahead)),
    of_heads(scalars_H12),
    of_heads(tile_HSX),
  ]
  if ahead:
    arguments += [k_BSF, v_BSF, seen_B1S]
    specs += [past, past, pl.BlockSpec((1, 1, W), lambda h, b, i: (b, 0, 0))]
  if keep_HSX is not None:
    arguments.append(keep_HSX)
    specs.append(of_heads(keep_HSX))
  lse = jax.ShapeDtypeStruct((B, H // G, G, T), jnp.float32)
  scratch = [
    ((W + Q, width), k_BSF.dtype),
    ((W + Q, width), v_BSF.dtype),
    ((1, W + Q), jnp.float32),
  ]
  moved = [
    (spec.block_shape, a.dtype)
    for spec, a in zip([*specs, here], [*arguments, q_BTF], strict=True)
  ]
  o_BTF, lse_BNGT = pl.pallas_call(
    functools.partial(
      _kernel,
      blocks=blocks,
      has_past=ahead > 0,
      normalize=normalize,
      normalize_own=normalize_own,
      bounded=bounded,
    ),
    grid=(H // G, B, T // Q),
    in_specs=specs,
    out_specs=[here, pl.BlockSpec((1, 1, G, Q), lambda h, b, i: (b, h, 0, i))],
    out_shape=[jax.ShapeDtypeStruct(q_BTF.shape, v_BSF.dtype), lse],
    scratch_shapes=[pltpu.VMEM(*each) for each in scratch],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary', 'arbitrary'),
      vmem_limit_bytes=bytes_needed(moved, scratch, 16 * S * X * 4),
    ),
    cost_estimate=pl.CostEstimate(
      flops=4 * B * T * F * X,
      transcendentals=B * H * T * X,
      bytes_accessed=2 * (q_BTF.nbytes + k_BSF.nbytes),
    ),
    interpret=interpret,
    name=f'window_attention_forward_{"bounded" if bounded else "maximum"}',
  )(*arguments)
  return o_BTF, lse_BNGT.reshape(B, H, T)


def pack(*scalars_H):
  """[H, 1, n]: scalars of each head, for a kernel to read."""
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
  bounded,
):
  *rest, o_ref, lse_ref, keys, values, seen = rest
  past, keep_ref = (rest[:3], rest[3:]) if has_past else (None, rest)
  W, Q = blocks.window, blocks.block

  is_first = pl.program_id(2) == 0
  for l, buffer in enumerate((keys, values)):
    zeros = jnp.zeros((W, blocks.key_width), buffer.dtype)
    buffer[:W] = jnp.where(is_first, past[l][0] if past else zeros, buffer[Q:])
  never = jnp.full((1, W), NEVER, seen.dtype)
  seen[:, :W] = jnp.where(is_first, past[2][0] if past else never, seen[:, Q:])
  values[W:], seen[:, W:] = v_ref[0], seen_ref[0]

  write_outputs(
    blocks,
    q_ref,
    taken_keys(blocks, k_ref, keys, normalize_own),
    values,
    scalars_ref,
    lambda j, head: tile_ref[head] + seen[:, blocks.seen(j)],
    (lambda j, head: keep_ref[0][head]) if keep_ref else None,
    o_ref,
    lse_ref,
    normalize=normalize,
    bounded=bounded,
  )


def taken_keys(blocks, k_ref, keys, normalize_own: bool):
  """Puts own keys behind those before them; reads: (j, head) -> those seen.

  Raw ones are brought to unit length when the sub-block is read whose own they
  are, so that products fill the time of it.
  """
  if not normalize_own:
    keys[blocks.window :] = k_ref[0]
    return functools.partial(blocks.read, keys)

  def read(j, head):
    if blocks.first_of_key(head):
      columns = blocks.key_columns(head)
      k, _ = unit(k_ref[0, blocks.queries(j), columns])
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
  bounded,
):
  """Outputs and logarithms of one block of queries.

  Args:
    blocks, normalize, bounded: of the kernel.
    q_ref, scalars_ref: what it reads.
    keys: (j, head) -> those that a sub-block sees.
    values: all that its queries see.
    added: (j, head) -> what is added to logits of a sub-block, to base 2.
    keep: (j, head) -> factors of its probabilities; None: all 1.
    o_ref, lse_ref: what it writes.
  """
  dtype = q_ref.dtype

  def logits(j, head):
    q = q_ref[0, blocks.queries(j), blocks.columns(head)]
    if normalize:
      q = (unit(q)[0] * (scalars_ref[head, :, :1] * LOG2E)).astype(dtype)
    s = dot(q, keys(j, head), AB_T)
    if not normalize:
      s = s * LOG2E
    return s + added(j, head)

  def output(j, head, s):
    rows = blocks.queries(j)
    if not bounded:
      # The floor keeps the exponentials of a row without keys at 0.
      top = jnp.maximum(jnp.max(s, 1, keepdims=True), NEVER / 2)
      s = s - top
    p = jnp.exp2(s)
    total = jnp.sum(p, 1, keepdims=True)
    if keep:
      p = p * keep(j, head)
    o = dot(p.astype(values.dtype), blocks.read(values, j, head))
    share = reciprocal(jnp.maximum(total, 1e-37), o_ref.dtype)
    o_ref[0, rows, blocks.columns(head)] = (o * share).astype(o_ref.dtype)
    total = as_row(total)
    lse = jnp.log2(jnp.where(total > 0, total, 1)) + scalars_ref[head, :, 1:2]
    if not bounded:
      lse += as_row(top)
    lse_ref[0, 0, head : head + 1, rows] = jnp.where(total > 0, lse, 0)

  blocks.sub_blocks(logits, output)
