"""Reading text and writing on: exact, at a flat cost per token.

The model's state after any number of tokens is the state at the last block
border, opened: a token more costs one step, whatever was read before. Recurrent
states move at block borders, as in training, so that generated text sees what
teacher forcing would give. Long texts are read segment by segment.

A model that reads one token at a time, whatever its cell can do.
"""

from collections.abc import Iterator
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.distributed.hosts import MeshJit
from meliad_rec.generation.sampling import Sampler
from meliad_rec.models.model import Model


class BlockStepper:
  """Steps of a cell that has none: each runs the open block again.

  Exact for every cell, at the cost of a block per token.
  """

  def __init__(self, model: Model):
    self.model = model
    self.block = model.cell.block_length

  def to_decode_state(self, variables, state, rows):
    return state, jnp.zeros((rows, self.block), jnp.int32), jnp.int32(0)

  def decode_step(self, variables, opened, tokens_B):
    state, tokens_BW, filled = opened
    tokens_BW = tokens_BW.at[:, filled].set(tokens_B)
    B, W = tokens_BW.shape
    seen_BW = jnp.broadcast_to(jnp.arange(W) <= filled, (B, W))
    after, logits_BWV = self.model.apply(
      variables, state, tokens_BW, jnp.zeros(B, bool), seen_BW
    )
    full = filled + 1 == W
    state = jax.tree.map(
      lambda new, old: jnp.where(full, new, old), after, state
    )
    tokens_BW = jnp.where(full, 0, tokens_BW)
    opened = state, tokens_BW, jnp.where(full, 0, filled + 1)
    return opened, logits_BWV[:, filled]

  def to_segment_state(self, variables, opened):
    return opened[0]


class TokenStepper:
  """Steps of a cell that streams."""

  def __init__(self, model: Model):
    self.model = model

  def to_decode_state(self, variables, state, rows):
    return self.model.apply(variables, state, method='to_decode_state')

  def decode_step(self, variables, opened, tokens_B):
    return self.model.apply(variables, opened, tokens_B, method='decode_step')

  def to_segment_state(self, variables, opened):
    return self.model.apply(variables, opened, method='to_segment_state')


RECENT = 4  # A character has at most so many bytes, and so many tokens.


class Reading(struct.PyTreeNode):
  """Where a reader stands; rows move together."""

  opened: Any  # The model's opened state, behind the last token.
  recent_BN: jax.Array  # int32: the last tokens; 0 before the first.
  count: jax.Array  # int32: tokens the model has seen.

  @property
  def pending_B(self):
    """The last token, which the model has not yet seen."""
    return self.recent_BN[:, -1]

  def repeat(self, rows: int) -> 'Reading':
    """One row's reading, for each of so many rows."""
    return jax.tree.map(
      lambda a: jnp.repeat(a, rows, 0) if jnp.ndim(a) else a, self
    )


class Decoder:
  """Reads and writes with one model and its parameters.

  Args:
    model: any language model.
    params: its parameters; `variables` may be set to others later.
    segment: tokens read at once; a multiple of the block length.
    chunk: tokens generated per call of the compiled loop.
    mesh: where the parameters lie; None: on one device.

  Raises:
    ValueError: the segment is not whole blocks.
  """

  def __init__(
    self,
    model,
    params,
    segment: int,
    chunk: int = 16,
    mesh: jax.sharding.Mesh | None = None,
  ):
    # The model would clear at each call; training does at each segment.
    self.clears = model.clear_state
    self.model = model = model.clone(clear_state=False)
    self.segment = segment
    self.chunk = chunk
    self.variables = {'params': params}
    # Where any number of tokens may be read, this bounds single steps.
    self.block = model.cell.block_length or max(
      n for n in range(1, max(segment // 8, 1) + 1) if segment % n == 0
    )
    if segment % self.block:
      raise ValueError(
        f'Text is read in segments of whole blocks of {self.block} tokens; the '
        f'segment has {segment}. Set SEGMENT to a multiple of '
        f'{model.cell.block_setting}.'
      )
    streams = model.cell.can_step
    self._stepper = (TokenStepper if streams else BlockStepper)(model)
    place = lambda jitted: MeshJit(mesh, jitted) if mesh else jitted
    self._run = place(jax.jit(self._run_blocks))
    self._step = place(jax.jit(self._run_steps))
    self._draw = place(jax.jit(self._draw_chunk, static_argnums=1))

  def start(self, rows: int) -> Reading:
    """Before the first token of `rows` documents."""
    state = self.model.apply(self.variables, rows, method='initial_state')
    opened = self._stepper.to_decode_state(self.variables, state, rows)
    recent_BN = jnp.zeros((rows, RECENT), jnp.int32)
    return Reading(opened, recent_BN, jnp.int32(0))

  def read(self, reading: Reading, tokens_BT: np.ndarray) -> Reading:
    """Behind these tokens, of which there may be any number."""
    tokens_BT = np.asarray(tokens_BT, np.int32)
    # What the model sees lags one behind: the last token stays pending.
    all_BT = np.concatenate([np.asarray(reading.recent_BN), tokens_BT], 1)
    line_BT = all_BT[:, RECENT - 1 :]
    T, at, W = line_BT.shape[1] - 1, 0, self.block
    while at < T:
      rest, to_border = T - at, -int(reading.count) % W
      if to_border or rest < W:
        take = min(to_border or W, rest)
        part_BW = np.zeros((len(line_BT), W), np.int32)
        part_BW[:, :take] = line_BT[:, at : at + take]
        reading = self._step(self.variables, reading, part_BW, take)
      else:
        begins = int(reading.count) % self.segment == 0
        take = self.segment if begins and rest >= self.segment else W
        part_BT = line_BT[:, at : at + take]
        reading = self._run(self.variables, reading, part_BT)
      at += take
    return reading.replace(recent_BN=jnp.asarray(all_BT[:, -RECENT:]))

  def generate(
    self, reading: Reading, count: int, sampler: Sampler, seed: int
  ) -> Iterator[tuple[Reading, np.ndarray]]:
    """Yields where it stands and the tokens_BT just written, chunk by chunk.

    A seed gives each row the same text, however many rows and chunks there are.
    """
    rng = jax.random.key_data(jax.random.key(seed))
    while count > 0:
      take = min(self.chunk, count)
      reading, tokens_BC = self._draw(
        self.variables, sampler, reading, rng, take
      )
      count -= take
      yield reading, np.asarray(tokens_BC)[:, :take]

  def _begin(self, variables, reading):
    """With `clear_state`, forgets where a segment of training would begin."""
    if not self.clears:
      return reading

    def forget(opened):
      state = self._stepper.to_segment_state(variables, opened)
      state = self.model.apply(variables, state, method='clear')
      return self._stepper.to_decode_state(
        variables, state, len(reading.recent_BN)
      )

    opened = jax.lax.cond(
      reading.count % self.segment == 0, forget, lambda o: o, reading.opened
    )
    return reading.replace(opened=opened)

  def _run_blocks(self, variables, reading, tokens_BT):
    B, T = tokens_BT.shape
    reading = self._begin(variables, reading)
    state, _ = self.model.apply(
      variables,
      self._stepper.to_segment_state(variables, reading.opened),
      tokens_BT,
      jnp.zeros(B, bool),
      jnp.ones((B, T), bool),
    )
    opened = self._stepper.to_decode_state(variables, state, B)
    return reading.replace(opened=opened, count=reading.count + T)

  def _run_steps(self, variables, reading, tokens_BW, take):
    def step(t, reading):
      reading = self._begin(variables, reading)
      opened, _ = self._stepper.decode_step(
        variables, reading.opened, tokens_BW[:, t]
      )
      return reading.replace(opened=opened, count=reading.count + 1)

    return jax.lax.fori_loop(0, take, step, reading)

  def _draw_chunk(self, variables, sampler, reading, rng, take):
    row_B = jnp.arange(len(reading.recent_BN))
    rng_B = jax.vmap(jax.random.fold_in, (None, 0))(
      jax.random.wrap_key_data(rng), row_B
    )

    def draw(t, carry):
      reading, tokens_BC = carry
      reading = self._begin(variables, reading)
      opened, logits_BV = self._stepper.decode_step(
        variables, reading.opened, reading.pending_B
      )
      key_B = jax.vmap(jax.random.fold_in, (0, None))(rng_B, reading.count)
      token_B = sampler(key_B, logits_BV).astype(jnp.int32)
      recent_BN = jnp.roll(reading.recent_BN, -1, 1).at[:, -1].set(token_B)
      reading = Reading(opened, recent_BN, reading.count + 1)
      return reading, tokens_BC.at[:, t].set(token_B)

    # The count is no shape: the last, shorter chunk is not compiled again.
    tokens_BC = jnp.zeros((len(row_B), self.chunk), jnp.int32)
    return jax.lax.fori_loop(0, take, draw, (reading, tokens_BC))
