"""A staircase token by token, for generation.

Within a chunk too, a token sees in each pass only tokens up to itself: their
keys are kept, by pass and layer, until the chunk is full. So a token costs M
passes over itself, one where M is 0, and not over its chunk.
"""

from typing import Any

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.archs.memory_cell import Memory
from meliad_rec.attention import KV
from meliad_rec.memory_scan import tokens


class Opened(struct.PyTreeNode):
  """A chunk of which only the first tokens are there."""

  memory: Memory  # Before the chunk.
  kv: Any  # By pass and layer: C - 1 empty places, older keys, the chunk's.
  mask_BS: jax.Array  # bool, of all tokens before the chunk, and its own.
  written: Any  # Of the chunk; as memory.written, leaves [B, C, ...].
  filled_B: jax.Array  # int32: its tokens so far, the same in each row.


def open_chunk(cell, state: Memory) -> Opened:
  """At the border between two chunks of staircase.Staircase."""
  C, M, config = cell.chunk, cell.live_passes, cell.config
  keys, B = cell.keys(state.written), len(state.mask_BA)

  def buffer(n: int, i: int):
    dims = config.kept_heads, config.head_width
    empty = lambda length: [jnp.zeros((B, length, *dims), config.dtype)] * 2
    parts = empty(C - 1), *cell.older(keys, n, i), empty(C)
    return [jnp.concatenate(each, 1) for each in zip(*parts, strict=True)]

  return Opened(
    state,
    [[buffer(n, i) for i in range(cell.count)] for n in range(max(M, 1))],
    jnp.pad(state.mask_BA, ((0, 0), (0, C))),
    jax.tree.map(lambda a: jnp.zeros_like(a[:, :C]), state.written),
    jnp.zeros(B, jnp.int32),
  )


def step(cell, opened: Opened, block):
  """Reads one token, in all passes: what is opened then, and y_B1D."""
  C, filled = cell.chunk, opened.filled_B[0]
  behind = lambda a, new: tokens.put(a, new, a.shape[1] - C + filled)
  near = lambda a: tokens.at(a, filled, a.shape[1] - C + 1)
  mask_BS = behind(opened.mask_BS, block.mask)
  y_B1D, inputs, buffers = block.x, [], []
  for n, kv in enumerate(opened.kv):
    inputs.append([])
    buffers.append([])
    seen = near(jnp.pad(mask_BS[:, n * C :], ((0, 0), (C - 1, 0))))
    for layer, pair in zip(cell.layers, kv, strict=True):
      inputs[n].append(y_B1D)
      n_B1D = layer.enter(y_B1D)
      own = layer.kv(n_B1D, block.mask)
      k, v = map(behind, pair, (own.k, own.v))
      buffers[n].append([k, v])
      past = KV(near(k), near(v), seen)
      y_B1D = cell.apply_layer(layer, y_B1D, n_B1D, past)
  written = cell.to_write(inputs, y_B1D)
  opened = Opened(
    opened.memory,
    buffers,
    mask_BS,
    jax.tree.map(
      lambda a, new: tokens.put(a, new, filled), opened.written, written
    ),
    opened.filled_B + 1,
  )
  return nn.cond(
    filled + 1 == C, _next_chunk, lambda _, o: o, cell, opened
  ), y_B1D


def _next_chunk(cell, opened: Opened) -> Opened:
  """A full chunk closed, and the next one opened."""
  C = cell.chunk
  push = lambda a, new: jnp.concatenate([a, new], 1)[:, C:]
  written = jax.tree.map(push, opened.memory.written, opened.written)
  return open_chunk(cell, Memory(written, opened.mask_BS[:, C:]))
