"""Reads tokens and generates their continuation, at a constant cost per token.

Between two tokens, a model has a decode state. `to_decode_state` makes it from
the model's state at a block boundary, `decode_step` advances it by one token,
and `to_segment_state` turns it back, at a block boundary, into a state from
which the model can read whole segments. The cost of a token does not depend on
the length of the text before it.

Recurrent states are updated at block boundaries, as in training, so that tokens
have the same logits as if the whole text had been read at once. Long texts are
read segment by segment.
"""

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.distributed.hosts import mesh_jit
from meliad_rec.generation.beam import BeamSearch
from meliad_rec.generation.beam import Hypotheses
from meliad_rec.generation.sampling import Sampler
from meliad_rec.models.cell import reading_block
from meliad_rec.models.model import Model

RECENT = 4  # A UTF-8 character has at most 4 bytes, and so at most 4 tokens.


class TokenStepper:
  """Decoding steps of one token, for a model whose cell.can_step is True."""

  def __init__(self, model: Model):
    self.model = model

  def to_decode_state(self, variables, state, rows):
    return self.model.apply(variables, state, method='to_decode_state')

  def decode_step(self, variables, decode_state, tokens_B, source_kv=None):
    return self.model.apply(
      variables, decode_state, tokens_B, source_kv, method='decode_step'
    )

  def to_segment_state(self, variables, decode_state):
    return self.model.apply(variables, decode_state, method='to_segment_state')


class BlockStepper:
  """Steps of one token for a model whose cell.can_step is False.

  Such a cell reads only whole blocks. Each step reads the whole unfinished
  block again, so each token costs as much as a block. Logits are exact.

  The decode state is the state at the last block boundary, the tokens of the
  unfinished block, and their number.
  """

  def __init__(self, model: Model):
    self.model = model
    self.block = model.cell.block_length

  def to_decode_state(self, variables, state, rows):
    return state, jnp.zeros((rows, self.block), jnp.int32), jnp.int32(0)

  def decode_step(self, variables, decode_state, tokens_B, source_kv=None):
    assert source_kv is None, 'Every cell with a source can step.'
    state, tokens_BW, filled = decode_state
    tokens_BW = tokens_BW.at[:, filled].set(tokens_B)
    B, W = tokens_BW.shape
    mask_BW = jnp.broadcast_to(jnp.arange(W) <= filled, (B, W))
    after, logits_BWV = self.model.apply(
      variables, state, tokens_BW, jnp.zeros(B, bool), mask_BW
    )
    full = filled + 1 == W
    state = jax.tree.map(
      lambda new, old: jnp.where(full, new, old), after, state
    )
    tokens_BW = jnp.where(full, 0, tokens_BW)
    decode_state = state, tokens_BW, jnp.where(full, 0, filled + 1)
    return decode_state, logits_BWV[:, filled]

  def to_segment_state(self, variables, decode_state):
    return decode_state[0]


class DecoderState(struct.PyTreeNode):
  """State of a decoder after some text.

  All rows have read the same number of tokens. The last token of each row is
  pending: the model reads it only when the token after it is needed.
  """

  decode_state: Any  # State of the model after all except the pending token.
  recent_BN: jax.Array  # int32: the last N = RECENT tokens; 0 before the text.
  count: jax.Array  # int32: number of tokens of a row that the model has read.

  @property
  def pending_B(self):
    """The last token of each row, which the model has not read yet."""
    return self.recent_BN[:, -1]

  def repeat(self, rows: int) -> 'DecoderState':
    """Returns a state with `rows` copies of each row, side by side."""
    return jax.tree.map(
      lambda a: jnp.repeat(a, rows, 0) if jnp.ndim(a) else a, self
    )


class Decoder:
  """Reader and generator of tokens, with a model and its parameters.

  Args:
    model: any model.Model that predicts the next token.
    params: parameters of the model. To use others later, set `variables` to
      {'params': others}.
    segment: maximum number of tokens of a row that are read at once, a multiple
      of the cell's block length.
    chunk: number of tokens that each call of the compiled loop generates for a
      row.
    mesh: mesh of the parameters. None means that they are on one device.

  Raises:
    ValueError: the segment is not a multiple of the block length.
  """

  def __init__(
    self,
    model,
    params,
    segment: int,
    chunk: int = 16,
    mesh: jax.sharding.Mesh | None = None,
  ):
    # A model with clear_state clears it in every call. Here that must happen
    # once per segment, as in training, so the decoder does it.
    self.clear_state = model.clear_state
    self.model = model = model.clone(clear_state=False)
    self.segment = segment
    self.chunk = chunk
    self.variables = {'params': params}
    self.block = reading_block(model.cell, segment)
    if segment % self.block:
      raise ValueError(
        f'The segment must be a multiple of the block length, {self.block}, '
        f'got {segment}. Set SEGMENT to a multiple of '
        f'{model.cell.block_setting}.'
      )
    can_step = model.cell.can_step
    self._stepper = (TokenStepper if can_step else BlockStepper)(model)
    self._start = mesh_jit(mesh, self._traced_start, static_argnums=1)
    self._read_blocks = mesh_jit(mesh, self._traced_blocks)
    self._read_tokens = mesh_jit(mesh, self._traced_tokens)
    self._generate = mesh_jit(mesh, self._traced_chunk, static_argnums=1)
    self._search = mesh_jit(mesh, self._traced_search, static_argnums=1)
    self._translate = mesh_jit(mesh, self._traced_targets, static_argnums=1)

  def start(self, rows: int) -> DecoderState:
    """Returns the state at the beginning of `rows` documents."""
    return self._start(self.variables, rows)

  def with_parts_of(self, state: DecoderState, other: Any) -> DecoderState:
    """Returns the state with the recurrent parts of another state.

    Args:
      state: a state at a block boundary.
      other: a state of the model, as many rows.
    """
    parts = self.model.apply(self.variables, other, method='parts')
    model_state = self._stepper.to_segment_state(
      self.variables, state.decode_state
    )
    model_state = self.model.apply(
      self.variables, model_state, parts, method='with_parts'
    )
    rows = len(state.recent_BN)
    return state.replace(
      decode_state=self._stepper.to_decode_state(
        self.variables, model_state, rows
      )
    )

  def read(
    self,
    state: DecoderState,
    tokens_BT: np.ndarray,
    on_progress: Callable[[int], None] = lambda tokens: None,
  ) -> DecoderState:
    """Returns the state after reading more tokens.

    Args:
      state: the state before these tokens.
      tokens_BT: int ids; T is any number.
      on_progress: called several times during the call, with the number of
        tokens of each row that the model has read in this call.
    """
    tokens_BT = np.asarray(tokens_BT, np.int32)
    all_BT = np.concatenate([np.asarray(state.recent_BN), tokens_BT], 1)
    # The model reads the pending token first, and the last one stays pending.
    line_BT = all_BT[:, RECENT - 1 :]
    T, at, W = line_BT.shape[1] - 1, 0, self.block
    while at < T:
      rest, to_border = T - at, -int(state.count) % W
      if to_border or rest < W:
        take = min(to_border or W, rest)
        part_BW = np.zeros((len(line_BT), W), np.int32)
        part_BW[:, :take] = line_BT[:, at : at + take]
        state = self._read_tokens(self.variables, state, part_BW, take)
      else:
        at_segment = int(state.count) % self.segment == 0
        take = self.segment if at_segment and rest >= self.segment else W
        part_BT = line_BT[:, at : at + take]
        state = self._read_blocks(self.variables, state, part_BT)
      at += take
      on_progress(at)
    return state.replace(recent_BN=jnp.asarray(all_BT[:, -RECENT:]))

  def generate(
    self, state: DecoderState, count: int, sampler: Sampler, seed: int
  ) -> Iterator[tuple[DecoderState, np.ndarray]]:
    """Yields (state, tokens_BT) for each chunk of generated tokens.

    The state is that after the chunk. A chunk has Decoder.chunk tokens of each
    row; the last one may be shorter. The tokens of a row depend on the seed and
    on the index of the row, but neither on the number of rows nor on
    Decoder.chunk.

    Args:
      state: the state after the prompt.
      count: number of tokens to generate for each row.
      sampler: draws the tokens.
      seed: seed of the draws.
    """
    rng = jax.random.key_data(jax.random.key(seed))
    while count > 0:
      take = min(self.chunk, count)
      state, tokens_BC = self._generate(
        self.variables, sampler, state, rng, take
      )
      count -= take
      yield state, np.asarray(tokens_BC)[:, :take]

  def search(
    self,
    state: DecoderState,
    count: int,
    beam: BeamSearch,
    end: int | None = None,
  ) -> Hypotheses:
    """Returns the best continuations of each row, the best first.

    Args:
      state: the state after the prompt.
      count: greatest number of tokens of a continuation, at least 1.
      beam: settings of the search.
      end: id of the token that ends a continuation. None: only `count` does.
    """
    return self._search(self.variables, (beam, count, end), state)

  def translate(
    self, source_BS: np.ndarray, count: int, beam: BeamSearch, end: int
  ) -> Hypotheses:
    """Returns the best targets of each source, the best first.

    Args:
      source_BS: int32 ids of sources, 0 at padding, for a model with an
        encoder.
      count: greatest number of tokens of a target, at least 1.
      beam: settings of the search.
      end: id of the token that ends a target.
    """
    return self._translate(self.variables, (beam, count, end), source_BS)

  def _traced_targets(self, variables, settings, source_BS):
    """Returns the Hypotheses of `translate`; settings: (beam, count, end)."""
    source_kv = self.model.apply(variables, source_BS, method='encode_source')
    state = self._traced_start(variables, len(source_BS))
    return self._traced_search(variables, settings, state, source_kv)

  def _traced_start(self, variables, rows):
    """Returns the state before the first token."""
    state = self.model.apply(variables, rows, method='initial_state')
    return DecoderState(
      self._stepper.to_decode_state(variables, state, rows),
      recent_BN=jnp.zeros((rows, RECENT), jnp.int32),
      count=jnp.int32(0),
    )

  def _traced_blocks(self, variables, state, tokens_BT):
    """Returns the state after reading whole blocks of a single segment."""
    B, T = tokens_BT.shape
    state = self._begin_segment(variables, state)
    model_state, _ = self.model.apply(
      variables,
      self._stepper.to_segment_state(variables, state.decode_state),
      tokens_BT,
      jnp.zeros(B, bool),
      jnp.ones((B, T), bool),
    )
    decode_state = self._stepper.to_decode_state(variables, model_state, B)
    return state.replace(decode_state=decode_state, count=state.count + T)

  def _traced_tokens(self, variables, state, tokens_BW, take):
    """Returns the state after reading the first `take` tokens one by one."""

    def step(t, state):
      return self._step(variables, state, tokens_BW[:, t])[0]

    return jax.lax.fori_loop(0, take, step, state)

  def _traced_chunk(self, variables, sampler, state, rng, take):
    """Generates `take` tokens for each row.

    Returns:
      The state after these tokens, and tokens_BC, where C is Decoder.chunk.
      Columns of tokens_BC from index `take` on are 0.
    """
    row_B = jnp.arange(len(state.recent_BN))
    rng_B = jax.vmap(jax.random.fold_in, (None, 0))(
      jax.random.wrap_key_data(rng), row_B
    )

    def step(t, carry):
      before, tokens_BC = carry
      state, logits_BV = self._step(variables, before, before.pending_B)
      key_B = jax.vmap(jax.random.fold_in, (0, None))(rng_B, before.count)
      token_B = sampler(key_B, logits_BV).astype(jnp.int32)
      recent_BN = jnp.roll(state.recent_BN, -1, 1).at[:, -1].set(token_B)
      state = state.replace(recent_BN=recent_BN)
      return state, tokens_BC.at[:, t].set(token_B)

    # `take` is not a shape, so the last, shorter chunk is not compiled again.
    tokens_BC = jnp.zeros((len(row_B), self.chunk), jnp.int32)
    return jax.lax.fori_loop(0, take, step, (state, tokens_BC))

  def _traced_search(self, variables, settings, state, source_kv=None):
    """Returns the Hypotheses of `search`; settings: (beam, count, end).

    The hypotheses of a row share its source, which is not copied.
    """
    beam, count, end = settings
    B, K = len(state.recent_BN), beam.beams
    over_axes = lambda f, state: jax.tree.map(
      lambda a: f(a) if jnp.ndim(a) else a, state
    )

    def by_row(state):
      return over_axes(lambda a: a.reshape(B, K, *a.shape[1:]), state)

    def step(state, tokens_BK):
      flat = over_axes(lambda a: a.reshape(B * K, *a.shape[2:]), state)
      tokens_N = tokens_BK.reshape(-1)
      flat, logits_NV = self._step(variables, flat, tokens_N, source_kv)
      return by_row(flat), logits_NV.reshape(B, K, -1)

    state, first_B = by_row(state.repeat(K)), state.pending_B
    return beam(step, state, first_B, count, end)

  def _step(self, variables, state, tokens_B, source_kv=None):
    """Reads one token of each row; returns the next state and logits_BV."""
    state = self._begin_segment(variables, state)
    decode_state, logits_BV = self._stepper.decode_step(
      variables, state.decode_state, tokens_B, source_kv
    )
    state = state.replace(decode_state=decode_state, count=state.count + 1)
    return state, logits_BV

  def _begin_segment(self, variables, state):
    """Returns the state, cleared if clear_state and a segment begins here."""
    if not self.clear_state:
      return state

    def clear(decode_state):
      model_state = self._stepper.to_segment_state(variables, decode_state)
      model_state = self.model.apply(variables, model_state, method='clear')
      return self._stepper.to_decode_state(
        variables, model_state, len(state.recent_BN)
      )

    decode_state = jax.lax.cond(
      state.count % self.segment == 0, clear, lambda s: s, state.decode_state
    )
    return state.replace(decode_state=decode_state)
