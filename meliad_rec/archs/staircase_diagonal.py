"""A staircase step by step, as the paper runs it (Ju et al. 2021, eq. 3).

Step i treats, in parallel, chunk i in its first pass, chunk i - 1 in its
second, and so on: T + M - 1 steps of up to M C tokens, where one chunk after
another takes T M steps of C tokens. Both compute the same, in training but for
what is dropped out; this one in fewer products, of more rows.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from meliad_rec.archs.memory_cell import Memory
from meliad_rec.cell import to_blocks
from meliad_rec.gathering import gather
from meliad_rec.remat import remat


def run(cell, state: Memory, block):
  """Reads a segment of T chunks, T at least M - 1.

  The first M - 1 steps begin with fewer chunks, beside what is known of those
  of earlier segments, and behind the last chunk M - 1 steps end with fewer.

  Args:
    cell: staircase.Staircase, M at least 1.
    state: its state.
    block: the segment.

  Returns:
    The state behind it, and y_BTD.
  """
  C, N, M = cell.chunk, cell.passes, cell.live_passes
  B, tokens, D = block.x.shape
  T, ramp = tokens // C, (M - 1) * C
  live, frozen = state.written
  begun = _begun(live, C, M)
  mask_BS = jnp.concatenate([state.mask_BA, block.mask], 1)

  def step(cell, carry, new, known=None):
    """Steps with no chunk to begin, or none to end, have other shapes."""
    x_BXD, past = carry
    i, x_BCD = new
    x_BXD = jnp.concatenate([x_BXD, x_BCD], 1)
    inputs, y_BXD = _core(cell, i, x_BXD, known, past, mask_BS)
    return inputs, y_BXD, past

  def full(cell, carry, new):
    _, y_BXD, past = step(cell, carry, new)
    return (y_BXD[:, C:], _push(past, y_BXD[:, :C])), y_BXD[:, :C]

  carry = block.x[:, :0], frozen[:, : (N - M) * C] if cell.freezes else None
  for i in range(M - 1):
    new = i, block.x[:, i * C : (i + 1) * C]
    known = [inputs[i] for inputs in begun]
    _, x_BXD, past = step(cell, carry, new, known)
    if past is not None:
      past = _push(past, frozen[:, (N - M + i) * C : (N - M + i + 1) * C])
    carry = x_BXD, past
  outputs = []
  if T >= M:
    scan = nn.scan(
      remat(full, cell.policy, in_scan=True),
      variable_broadcast='params',
      split_rngs={'params': False, 'dropout': False},
      in_axes=((0, 1),),
      out_axes=1,
      unroll=cell.unroll,
    )
    # Gathered once, and not in each step.
    scan = nn.map_variables(scan, 'params', trans_in_fn=gather)
    new = jnp.arange(M - 1, T), to_blocks(block.x[:, ramp:], C)
    carry, y = scan(cell, carry, new)
    outputs.append(y.reshape(B, -1, D))
  ended = []
  for i in range(T, T + M - 1):
    inputs, y_BXD, past = step(cell, carry, (i, block.x[:, :0]))
    outputs.append(y_BXD[:, :C])
    ended.append(inputs)
    carry = y_BXD[:, C:], _push(past, y_BXD[:, :C])
  y_BTD = jnp.concatenate(outputs, 1)
  if frozen is not None:
    frozen = _push(frozen, y_BTD)
  written = _ended(ended, cell.count, C, M), frozen
  A = state.mask_BA.shape[1]
  return Memory(written, mask_BS[:, mask_BS.shape[1] - A :]), y_BTD


def _core(cell, i, x_BXD, known, past, mask_BS):
  """One pass over the chunks of a step: the inputs of all layers, and y_BXD.

  Args:
    i: the step; its window begins N - 1 chunks before chunk i.
    x_BXD: the live chunks of this segment.
    known: what those of earlier segments enter each layer with, which stand
      before them; None: there are none.
    past: the outputs of the frozen chunks before all of these; None: there are
      none.
  """
  inputs = []
  for place, layer in enumerate(cell.layers):
    inputs.append(x_BXD)
    older = [a for a in (past, known and known[place]) if a is not None]
    n_BXD = layer.enter(x_BXD)
    n_BSD = jnp.concatenate([*map(layer.enter, older), n_BXD], 1)
    seen_BS = jax.lax.dynamic_slice_in_dim(
      mask_BS, i * cell.chunk, n_BSD.shape[1], 1
    )
    kv = layer.kv(n_BSD, seen_BS)
    x_BXD = cell.apply_layer(layer, x_BXD, n_BXD, kv)
  return inputs, x_BXD


def _begun(live, C: int, M: int):
  """Of each layer, what chunks of earlier segments enter it with, by step.

  In step i, pass p treats chunk i - p, which is of an earlier segment where
  p > i, and stands M - 1 - p chunks behind the first: [B, (M - 1 - i) C, D].
  """
  return [
    [
      jnp.concatenate(
        [inputs[p - 1][:, i * C : (i + 1) * C] for p in range(M - 1, i, -1)], 1
      )
      for i in range(M - 1)
    ]
    for inputs in zip(*live, strict=True)
  ]


def _ended(inputs, layers: int, C: int, M: int):
  """The other way round: what is written, of the steps behind the end."""
  live = []
  for p in range(1, M):
    at = slice((M - 1 - p) * C, (M - p) * C)
    live.append(
      [
        jnp.concatenate([inputs[step][i][:, at] for step in range(p)], 1)
        for i in range(layers)
      ]
    )
  return live


def _push(past, new):
  """The newest of both, as many as there were; None stays None."""
  if past is None:
    return None
  longer = jnp.concatenate([past, new], 1)
  return longer[:, longer.shape[1] - past.shape[1] :]
