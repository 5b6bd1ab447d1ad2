"""Staircase and Cached Staircase (Ju et al. 2021, sections 3.2 and 3.3).

A core of L layers passes N times over each chunk of C tokens. In pass n a chunk
sees itself and N - 1 - n chunks before it: the one before as it is in pass
n + 1, the one before that in pass n + 2, and so on. So a chunk can make all its
passes in a row: what it sees was there before it. In the Cached Staircase a
chunk is frozen after M passes, and seen from then on as it is at the end, by
all layers alike.

M = N is the Staircase, M = 1 the Cached Staircase of the paper's experiments,
and M = 0 a memory network: what is seen of older chunks are their embeddings.

A staircase step by step, as the paper runs it (Ju et al. 2021, eq. 3).

Step i treats, in parallel, chunk i in its first pass, chunk i - 1 in its
second, and so on: T + M - 1 steps of up to M C tokens, where one chunk after
another takes T M steps of C tokens. Both compute the same, in training but for
what is dropped out; this one in fewer products, of more rows.

A staircase token by token, for generation.

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
from meliad_rec.archs.memory_cell import MemoryCell
from meliad_rec.distributed.fsdp import all_gather_params
from meliad_rec.layers.attention import KV
from meliad_rec.layers.remat import remat
from meliad_rec.models.cell import to_blocks
from meliad_rec.recurrence import memory_scan


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
    scan = nn.map_variables(scan, 'params', trans_in_fn=all_gather_params)
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
    n_BXD = layer.pre_norm(x_BXD)
    n_BSD = jnp.concatenate([*map(layer.pre_norm, older), n_BXD], 1)
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


class DecodeState(struct.PyTreeNode):
  """A chunk of which only the first tokens are there."""

  memory: Memory  # Before the chunk.
  kv: Any  # By pass and layer: C - 1 empty places, older keys, the chunk's.
  mask_BS: jax.Array  # bool, of all tokens before the chunk, and its own.
  written: Any  # Of the chunk; as memory.written, leaves [B, C, ...].
  filled_B: jax.Array  # int32: its tokens so far, the same in each row.


def open_chunk(cell, state: Memory) -> DecodeState:
  """At the border between two chunks of staircase.Staircase."""
  C, M, config = cell.chunk, cell.live_passes, cell.config
  keys, B = cell.keys(state.written), len(state.mask_BA)

  def buffer(n: int, i: int):
    dims = config.kv_heads, config.head_dim
    empty = lambda length: [jnp.zeros((B, length, *dims), config.dtype)] * 2
    parts = empty(C - 1), *cell.older(keys, n, i), empty(C)
    return [jnp.concatenate(each, 1) for each in zip(*parts, strict=True)]

  return DecodeState(
    state,
    [[buffer(n, i) for i in range(cell.count)] for n in range(max(M, 1))],
    jnp.pad(state.mask_BA, ((0, 0), (0, C))),
    jax.tree.map(lambda a: jnp.zeros_like(a[:, :C]), state.written),
    jnp.zeros(B, jnp.int32),
  )


def step_tokens(cell, opened: DecodeState, block):
  """Reads one token, in all passes: what is opened then, and y_B1D."""
  C, filled = cell.chunk, opened.filled_B[0]
  behind = lambda a, new: memory_scan.put(a, new, a.shape[1] - C + filled)
  near = lambda a: memory_scan.slice_tokens(a, filled, a.shape[1] - C + 1)
  mask_BS = behind(opened.mask_BS, block.mask)
  y_B1D, inputs, buffers = block.x, [], []
  for n, kv in enumerate(opened.kv):
    inputs.append([])
    buffers.append([])
    seen = near(jnp.pad(mask_BS[:, n * C :], ((0, 0), (C - 1, 0))))
    for layer, pair in zip(cell.layers, kv, strict=True):
      inputs[n].append(y_B1D)
      n_B1D = layer.pre_norm(y_B1D)
      own = layer.kv(n_B1D, block.mask)
      k, v = map(behind, pair, (own.k, own.v))
      buffers[n].append([k, v])
      past = KV(near(k), near(v), seen)
      y_B1D = cell.apply_layer(layer, y_B1D, n_B1D, past)
  written = cell.to_write(inputs, y_B1D)
  opened = DecodeState(
    opened.memory,
    buffers,
    mask_BS,
    jax.tree.map(
      lambda a, new: memory_scan.put(a, new, filled), opened.written, written
    ),
    opened.filled_B + 1,
  )
  return nn.cond(
    filled + 1 == C, _next_chunk, lambda _, o: o, cell, opened
  ), y_B1D


def _next_chunk(cell, opened: DecodeState) -> DecodeState:
  """A full chunk closed, and the next one opened."""
  C = cell.chunk
  push = lambda a, new: jnp.concatenate([a, new], 1)[:, C:]
  written = jax.tree.map(push, opened.memory.written, opened.written)
  return open_chunk(cell, Memory(written, opened.mask_BS[:, C:]))


class Staircase(MemoryCell):
  """State: the inputs of all layers in passes 1 to M - 1 of older chunks.

  And, where M < N, their outputs. Stored are the inputs of layers, and not, as
  in the authors' code, their outputs: splitting a document changes nothing. On
  a CPU, with XLA's own settings, a small one read in the same form has the same
  outputs and states bit for bit; elsewhere products of other sizes are rounded
  otherwise.

  Attributes:
    config: of the layers; the window is N C, the paper's step size. Dropout is
      as LayerConfig says, but that chunk by chunk nothing is dropped behind the
      norm of what is seen of older chunks; step by step it is.
    count, share_position, layer_drop, span: see MemoryCell.
    passes: N.
    live: passes M after which a chunk is frozen; None: N.
    diagonal: whether segments are read step by step, as staircase_diagonal
      does, instead of chunk by chunk. None: those of M - 1 chunks or more,
      where M > 1 and N is at most 2 M, for the larger products; elsewhere a
      copy of the frozen chunks, kept for each step, needs more memory than all
      else. True: any, and shorter ones are an error; but a single chunk outside
      of training, as prompts may end with one, is read as such.
  """

  passes: int
  live: int | None = None
  diagonal: bool | None = None

  @property
  def chunk(self):
    return self.config.window // self.passes

  @property
  def block_setting(self):
    return 'WINDOW / PASSES'

  @property
  def live_passes(self) -> int:
    return self.passes if self.live is None else self.live

  @property
  def freezes(self) -> bool:
    return self.passes > self.live_passes

  @property
  def by_steps(self):
    if self.diagonal is not None:
      return self.diagonal
    return self.live_passes > 1 and self.passes <= 2 * self.live_passes

  def setup(self):
    N, window = self.passes, self.config.window
    if N < 1 or window % N:
      raise ValueError(
        f'A window of {window} tokens is to be {N} chunks; set PASSES to a '
        'divisor of WINDOW.'
      )
    if not 0 <= self.live_passes <= N:
      raise ValueError(
        f'Chunks are to be frozen after {self.live} of {N} passes; set '
        f'staircase.Staircase.live from 0 to {N}.'
      )
    if self.diagonal and not self.live_passes:
      raise ValueError(
        'diagonal is set, and chunks that are frozen at once make no passes to '
        'read step by step; leave it out.'
      )
    self.layers = self.make_layers(self.config)

  def empty(self, batch):
    C, N, M = self.chunk, self.passes, self.live_passes
    zeros = lambda n: jnp.zeros(
      (batch, n * C, self.config.d_model), self.config.dtype
    )
    live = [[zeros(n)] * self.count for n in range(1, M)]
    return live, zeros(N - 1) if self.freezes else None

  def __call__(self, state, block):
    T, least = block.x.shape[1], (self.live_passes - 1) * self.chunk
    if self.by_steps and not self.is_initializing():
      if least <= T:
        self.penalise_spans()
        return run(self, state, block)
      if self.diagonal and (self.chunk < T or self.has_rng('dropout')):
        raise ValueError(
          f'diagonal is set, and a segment has {T} tokens, {T // self.chunk} '
          f'chunks; step by step it needs {least} or more, a chunk for each '
          'pass but one. Set SEGMENT higher, or leave '
          'staircase.Staircase.diagonal out.'
        )
    return super().__call__(state, block)

  def keys(self, written):
    live, frozen = written
    kv = lambda layer, x: layer.kv(
      layer.pre_norm(x), jnp.ones(x.shape[:2], bool)
    )
    pair = lambda kv: (kv.k, kv.v)
    live = [
      [pair(kv(layer, x)) for layer, x in zip(self.layers, xs, strict=True)]
      for xs in live
    ]
    if frozen is not None:
      frozen = [pair(kv(layer, frozen)) for layer in self.layers]
    return live, frozen

  def read(self, kv, mask_BS, x_BCD):
    M, inputs = self.live_passes, []
    y_BCD = x_BCD
    for n in range(max(M, 1)):
      inputs.append([])
      seen = mask_BS[:, n * self.chunk :]
      for i, layer in enumerate(self.layers):
        inputs[n].append(y_BCD)
        n_BCD = layer.pre_norm(y_BCD)
        own = layer.kv(n_BCD, mask_BS[:, -self.chunk :])
        parts = [*self.older(kv, n, i), (own.k, own.v)]
        k, v = (jnp.concatenate(each, 1) for each in zip(*parts, strict=True))
        y_BCD = self.apply_layer(layer, y_BCD, n_BCD, KV(k, v, seen))
    return self.to_write(inputs, y_BCD), y_BCD

  def to_write(self, inputs, y_BCD):
    """What is written, given the inputs of all layers in all passes."""
    M = self.live_passes
    frozen = (y_BCD if M else inputs[0][0]) if self.freezes else None
    return inputs[1:M], frozen

  def older(self, kv, n: int, i: int):
    """Keys and values that layer i sees of older chunks in pass n, in order."""
    live, frozen = kv
    C, N, M = self.chunk, self.passes, self.live_passes
    cut = lambda pair, a, b: tuple(x[:, a * C : b * C] for x in pair)
    parts = []
    if frozen is not None:
      parts.append(cut(frozen[i], n, N - max(M - n, 1)))
    for back in range(M - 1 - n, 0, -1):
      parts.append(cut(live[n + back - 1][i], n, n + 1))
    return parts

  @property
  def can_step(self):
    return True

  def to_decode_state(self, state):
    return open_chunk(self, state)

  def decode_step(self, opened, block):
    return step_tokens(self, opened, block)

  def to_segment_state(self, opened):
    return opened.memory
