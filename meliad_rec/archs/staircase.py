"""Staircase and Cached Staircase (Ju et al. 2021, sections 3.2 and 3.3).

In the Staircase, a stack of L layers runs N times over each chunk of C tokens.
In pass n, counted from 0, a chunk attends to itself and to the N - 1 - n chunks
before it: to the previous chunk as it is in pass n + 1, to the one before that
as it is in pass n + 2, and so on. Each layer attends to its own inputs for
those chunks in those passes. A chunk can make all its passes in a row, since
everything that it attends to exists already.

In the Cached Staircase, the stack runs only M times over each chunk. After
these M passes the chunk is frozen; until then it is live. Where a later chunk
would attend to it as it is in pass M or later, all layers attend to its outputs
after the last pass instead.

M = N is the Staircase, and M = 1 the Cached Staircase of the paper's
experiments. M = 0 is a memory network: a chunk makes one pass, and later chunks
attend to its embeddings.

A segment is read chunk by chunk (`Staircase.read`), in steps of several chunks
(`run_diagonal`), or token by token for generation (`decode_token`).
"""

from typing import Any

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.archs.memory_cell import Memory
from meliad_rec.archs.memory_cell import MemoryCell
from meliad_rec.archs.stack import named_by_layer
from meliad_rec.distributed.fsdp import all_gather_params
from meliad_rec.layers.attention import KV
from meliad_rec.layers.remat import remat
from meliad_rec.metrics import pictures
from meliad_rec.models.cell import to_blocks
from meliad_rec.recurrence.memory_scan import put
from meliad_rec.recurrence.memory_scan import slice_tokens


class Staircase(MemoryCell):
  """State: the inputs of all layers in passes 1 to M - 1 of older chunks.

  Passes are numbered from 0, and a chunk is frozen after M of them. If M < N,
  the state also holds the outputs of frozen chunks. The authors' code stores
  the outputs of layers in place of their inputs. With inputs, the results do
  not depend on how a document is split into segments, except for rounding.

  Attributes:
    config: sizes and choices of the layers; the window is N chunks long, the
      paper's step size. Dropout is as in LayerConfig, with one exception: if
      segments are read chunk by chunk, the normalized vectors of older chunks
      have no dropout.
    count, share_position, layer_drop, span: see MemoryCell.
    passes: number of chunks N in the window. It is also the number of passes
      over each chunk, unless chunks are frozen earlier.
    live: number of passes M after which a chunk is frozen; None means N, so
      that no chunk is frozen.
    diagonal: whether segments are read in steps of several chunks (see
      run_diagonal) instead of chunk by chunk. None means that they are if
      M > 1, N <= 2 M and the segment has M - 1 chunks or more. With True, a
      training segment of fewer than M - 1 chunks is an error. Steps have larger
      matrix products. With N > 2 M, however, the frozen chunks copied for each
      step would take up most of the device's memory.
  """

  passes: int
  live: int | None = None
  diagonal: bool | None = None

  block_setting = 'WINDOW / PASSES'
  can_step = True

  @property
  def chunk(self):
    return self.config.window // self.passes

  @property
  def live_passes(self) -> int:
    """Number of passes M: `live`, or N if `live` is None."""
    return self.passes if self.live is None else self.live

  @property
  def freezes(self) -> bool:
    """Whether chunks are frozen: M < N."""
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
        f'passes must divide the window of {window} tokens, got {N}. Set '
        'PASSES or WINDOW.'
      )
    if not (N == 1) <= self.live_passes <= N:
      raise ValueError(
        f'live must be from {N == 1:d} to {N} passes, got {self.live}. Set '
        'staircase.Staircase.live.'
      )
    if self.diagonal and not self.live_passes:
      raise ValueError(
        'diagonal is True, but with live = 0 there are no passes to run in '
        'parallel. Remove staircase.Staircase.diagonal.'
      )
    self.layers = self.make_layers(self.config)

  def empty(self, batch):
    C, N, M = self.chunk, self.passes, self.live_passes
    zeros = lambda n: jnp.zeros(
      (batch, n * C, self.config.d_model), self.config.dtype
    )
    live = [[zeros(n)] * self.count for n in range(1, M)]
    return live, zeros(N - 1) if self.freezes else None

  def parts(self, state):
    live, frozen = state.written
    parts = named_by_layer(
      (layer, {f'pass_{n}': x[layer] for n, x in enumerate(live, 1)})
      for layer in range(self.count)
    )
    if frozen is not None:
      parts['frozen'] = frozen
    return parts | {'mask': state.mask_BA}

  def with_parts(self, state, parts):
    live = [
      [parts[f'layer_{layer}/pass_{n}'] for layer in range(self.count)]
      for n in range(1, self.live_passes)
    ]
    return Memory((live, parts.get('frozen')), parts['mask'])

  def __call__(self, state, block):
    T, least = block.x.shape[1], (self.live_passes - 1) * self.chunk
    by_steps = self.by_steps and not pictures.wanted(self)
    if by_steps and not self.is_initializing():
      if least <= T:
        self.penalize_spans()
        return run_diagonal(self, state, block)
      if self.diagonal and self.has_rng('dropout'):
        raise ValueError(
          f'With diagonal = True, a segment must have at least {least} tokens '
          f'({self.live_passes - 1} chunks of {self.chunk}), got {T}. Increase '
          'SEGMENT, or remove staircase.Staircase.diagonal.'
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

  def read(self, kv, mask_BS, x_BCD, first):
    del first  # All chunks of a segment share their dropout masks.
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
      pictures.sow(self, 'lens', lambda y_BCD=y_BCD: y_BCD)
    return self.to_write(inputs, y_BCD), y_BCD

  def to_write(self, inputs, y_BCD):
    """Returns the vectors that a chunk writes: a pytree like Memory.written.

    Args:
      inputs: inputs of each layer in each pass, as inputs[pass][layer].
      y_BCD: outputs of the last layer in the last pass.
    """
    M = self.live_passes
    frozen = (y_BCD if M else inputs[0][0]) if self.freezes else None
    return inputs[1:M], frozen

  def older(self, kv, n: int, i: int):
    """Returns what a new chunk attends to in one layer of one pass.

    Args:
      kv: result of `keys` for the memory.
      n: the pass, from 0.
      i: the layer, from 0.

    Returns:
      A list of pairs (keys, values) of older chunks, oldest first. If chunks
      are frozen, the first pair holds all frozen chunks; every other pair holds
      one live chunk.
    """
    live, frozen = kv
    C, N, M = self.chunk, self.passes, self.live_passes
    cut = lambda pair, a, b: tuple(x[:, a * C : b * C] for x in pair)
    parts = []
    if frozen is not None:
      parts.append(cut(frozen[i], n, N - max(M - n, 1)))
    for back in range(M - 1 - n, 0, -1):
      parts.append(cut(live[n + back - 1][i], n, n + 1))
    return parts

  def to_decode_state(self, state):
    return open_chunk(self, state)

  def decode_step(self, decode_state, block):
    return decode_token(self, decode_state, block)

  def to_segment_state(self, decode_state):
    return decode_state.memory


def run_diagonal(cell: Staircase, state: Memory, block):
  """Reads a segment in steps of several chunks (Ju et al. 2021, eq. 3).

  Step i processes chunk i in its first pass, chunk i - 1 in its second, and so
  on, all in parallel. A segment of T chunks, T >= M - 1, takes T + M - 1 steps
  of at most M C tokens. Reading it chunk by chunk takes T M steps of C tokens.
  Both ways give the same result (except for dropout), but the larger steps use
  fewer, larger matrix products.

  In a step, chunks that have not yet made all M passes are live. The first
  M - 1 steps and the last M - 1 steps process fewer than M chunks of this
  segment. In the first M - 1 steps, they also attend to live chunks of earlier
  segments.

  Letters: T chunks of the segment, X tokens of this segment in a step.

  Args:
    cell: the staircase, with M >= 1.
    state: the state before the segment.
    block: the segment, T C tokens.

  Returns:
    The state after the segment, and the outputs of the last pass, [B, T C, D].
  """
  C, N, M = cell.chunk, cell.passes, cell.live_passes
  B, tokens, D = block.x.shape
  T, ramp = tokens // C, (M - 1) * C
  live, frozen = state.written
  earlier = _inputs_by_step(live, C, M)
  mask_BS = jnp.concatenate([state.mask_BA, block.mask], 1)

  def step(cell, carry, new, known=None):
    """Returns the inputs of all layers, the outputs of the last one, and past.

    Steps at both ends of the segment have fewer chunks.
    """
    # Inputs of live chunks that have made a pass, outputs of frozen chunks.
    x_BXD, past = carry
    # The step, and the chunk that makes its first pass in it, if one is left.
    i, x_BCD = new
    x_BXD = jnp.concatenate([x_BXD, x_BCD], 1)
    inputs, y_BXD = _run_pass(cell, i, x_BXD, known, past, mask_BS)
    return inputs, y_BXD, past

  at_end = remat(step, cell.remat or 'none')

  def full(cell, carry, new):
    _, y_BXD, past = step(cell, carry, new)
    return (y_BXD[:, C:], _push(past, y_BXD[:, :C])), y_BXD[:, :C]

  carry = block.x[:, :0], frozen[:, : (N - M) * C] if cell.freezes else None
  for i in range(M - 1):
    new = i, block.x[:, i * C : (i + 1) * C]
    known = [inputs[i] for inputs in earlier]
    _, x_BXD, past = at_end(cell, carry, new, known)
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
    # Gathered once rather than in each step.
    scan = nn.map_variables(scan, 'params', trans_in_fn=all_gather_params)
    new = jnp.arange(M - 1, T), to_blocks(block.x[:, ramp:], C)
    carry, y = scan(cell, carry, new)
    outputs.append(y.reshape(B, -1, D))
  last_inputs = []
  for i in range(T, T + M - 1):
    inputs, y_BXD, past = at_end(cell, carry, (i, block.x[:, :0]))
    outputs.append(y_BXD[:, :C])
    last_inputs.append(inputs)
    carry = y_BXD[:, C:], _push(past, y_BXD[:, :C])
  y_BTD = jnp.concatenate(outputs, 1)
  if frozen is not None:
    frozen = _push(frozen, y_BTD)
  written = _inputs_by_pass(last_inputs, cell.count, C, M), frozen
  A = state.mask_BA.shape[1]
  return Memory(written, mask_BS[:, mask_BS.shape[1] - A :]), y_BTD


def _run_pass(cell, i, x_BXD, known, past, mask_BS):
  """Runs all layers once over the chunks of a step, each in its own pass.

  Args:
    cell: the staircase.
    i: the step, from 0; it processes chunk i in its first pass.
    x_BXD: the X tokens of the live chunks of this segment, oldest first.
    known: for each layer, its inputs at the live chunks of earlier segments,
      which precede the tokens of x_BXD. None: there are none.
    past: outputs of the frozen chunks, which precede `known`; or None.
    mask_BS: bool, False at padding, for the memory and the segment.

  Returns:
    A list of the inputs x_BXD of each layer, and the outputs y_BXD of the last
    one.
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


def _inputs_by_step(live, C: int, M: int):
  """Rearranges the inputs of live chunks of earlier segments by step.

  In step i of run_diagonal, pass p would process chunk i - p, which belongs to
  an earlier segment if p > i.

  Args:
    live: inputs of the layers as the state stores them: live[p - 1][layer] is
      [B, p C, D], the inputs in pass p of the last p chunks, for p from 1 on.
    C: number of tokens in a chunk.
    M: number of passes after which a chunk is frozen.

  Returns:
    Lists result[layer][i] for steps i < M - 1. Each array [B, (M - 1 - i) C, D]
    begins with the chunk in pass M - 1, and ends with the one in pass i + 1.
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


def _inputs_by_pass(inputs, layers: int, C: int, M: int):
  """Rearranges the inputs of the last M - 1 steps for the state.

  This is the inverse of `_inputs_by_step`, but `inputs` is inputs[step][layer].

  Args:
    inputs: inputs of the layers.
    layers: number of layers.
    C, M: see `_inputs_by_step`.

  Returns:
    Lists like the argument `live` of `_inputs_by_step`.
  """
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
  """Returns `past` with `new` appended and as many tokens dropped, or None."""
  if past is None:
    return None
  longer = jnp.concatenate([past, new], 1)
  return longer[:, longer.shape[1] - past.shape[1] :]


class StaircaseDecodeState(struct.PyTreeNode):
  """State within a chunk, while decoding token by token.

  In each pass, a token sees no later token of its chunk, so each pass can
  process one token at a time. The keys and values of the tokens read so far are
  kept, by pass and layer, until the chunk is full.

  Attributes:
    memory: the memory before the chunk.
    kv: keys and values, as kv[pass][layer]: C - 1 unused places, then older
      chunks, then this chunk, which has C tokens.
    mask_BS: bool, False at padding, for the tokens before the chunk and then
      those of the chunk.
    written: the vectors that the chunk writes: like memory.written, with leaves
      [B, C, ...].
    filled_B: int32, number of tokens read in the chunk, the same in each row.
  """

  memory: Memory
  kv: Any
  mask_BS: jax.Array
  written: Any
  filled_B: jax.Array


def open_chunk(cell: Staircase, state: Memory) -> StaircaseDecodeState:
  """Returns the decode state at the start of a chunk.

  Args:
    cell: the staircase.
    state: its state before the chunk.
  """
  C, M, config = cell.chunk, cell.live_passes, cell.config
  keys, B = cell.keys(state.written), len(state.mask_BA)

  def buffer(n: int, i: int):
    dims = config.kv_heads, config.head_dim
    empty = lambda length: [jnp.zeros((B, length, *dims), config.dtype)] * 2
    parts = empty(C - 1), *cell.older(keys, n, i), empty(C)
    return [jnp.concatenate(each, 1) for each in zip(*parts, strict=True)]

  return StaircaseDecodeState(
    state,
    [[buffer(n, i) for i in range(cell.count)] for n in range(max(M, 1))],
    jnp.pad(state.mask_BA, ((0, 0), (0, C))),
    jax.tree.map(lambda a: jnp.zeros_like(a[:, :C]), state.written),
    jnp.zeros(B, jnp.int32),
  )


def decode_token(cell: Staircase, decode_state: StaircaseDecodeState, block):
  """Reads one token in all passes; returns the new decode state and y_B1D.

  If the token fills the chunk, the new state is the state of the next chunk.
  """
  C, filled = cell.chunk, decode_state.filled_B[0]
  append = lambda a, new: put(a, new, a.shape[1] - C + filled)
  near = lambda a: slice_tokens(a, filled, a.shape[1] - C + 1)
  mask_BS = append(decode_state.mask_BS, block.mask)
  y_B1D, inputs, buffers = block.x, [], []
  for n, kv in enumerate(decode_state.kv):
    inputs.append([])
    buffers.append([])
    seen = near(jnp.pad(mask_BS[:, n * C :], ((0, 0), (C - 1, 0))))
    for layer, pair in zip(cell.layers, kv, strict=True):
      inputs[n].append(y_B1D)
      n_B1D = layer.pre_norm(y_B1D)
      own = layer.kv(n_B1D, block.mask)
      k, v = map(append, pair, (own.k, own.v))
      buffers[n].append([k, v])
      past = KV(near(k), near(v), seen)
      y_B1D = cell.apply_layer(layer, y_B1D, n_B1D, past)
  written = cell.to_write(inputs, y_B1D)
  insert = lambda a, new: put(a, new, filled)
  decode_state = StaircaseDecodeState(
    decode_state.memory,
    buffers,
    mask_BS,
    jax.tree.map(insert, decode_state.written, written),
    decode_state.filled_B + 1,
  )
  return nn.cond(
    filled + 1 == C, _next_chunk, lambda _, d: d, cell, decode_state
  ), y_B1D


def _next_chunk(cell, decode_state):
  """Returns the decode state at the start of the chunk after a full one."""
  C = cell.chunk
  push = lambda a, new: jnp.concatenate([a, new], 1)[:, C:]
  written = jax.tree.map(
    push, decode_state.memory.written, decode_state.written
  )
  return open_chunk(cell, Memory(written, decode_state.mask_BS[:, C:]))
