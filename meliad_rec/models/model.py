"""The model: token ids in, logits of the next token or of labels out.

With an encoder, the ids of a second sequence, the source, go in as well.

A segment is the tokens of each row that one call reads. In tasks that compare
two sequences (pairs), each half of a row holds one of them, and cell and head
treat the halves as separate rows. The state of a model is its cell's, or
{'cell': ..., 'head': ...} with a head. Every leaf is [B, ...], or [B, 2, ...]
for pairs.
"""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from meliad_rec.layers.dropout import check_rate
from meliad_rec.layers.dropout import TiledDropout
from meliad_rec.layers.norms import RMSNorm
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import reset
from meliad_rec.models.cell import run
from meliad_rec.models.cell import State
from meliad_rec.models.embedding import TiedEmbedding
from meliad_rec.models.heads import Head


class Model(nn.Module):
  """Embedding, cell, norm, and logits from the embedding or from a head.

  Attributes:
    vocab: number of token ids. Id 0 means padding; it is also the input
      from which the first token of a document is predicted.
    cell: the architecture, see cell.Cell.
    d_model: width D.
    dropout: rate of dropout before the logits.
    embedding_dropout: rate of dropout on the embeddings of tokens.
    dtype: dtype of activations; logits are float32.
    embedding: a class from embedding.py.
    logits_divisor: see embedding.Embedding.
    final_norm: a class from norms.py, for outputs of the cell and for memory
      slots that a head pools.
    clear_state: whether to clear the recurrent part of the state at the start
      of each segment, an ablation; see Cell.clear.
    head: a head of heads.py, which predicts labels. None means that the model
      predicts the next token.
    encoder: module (x_BSD, mask_BS) -> y_BSD, such as
      transformer.EncoderLayers. The model then maps sequences to sequences: it
      predicts the next token of a target, and the cell attends to the encoder's
      output for a source. Both sequences share the embedding. None means that
      there is no source.
    encoder_norm: a class from norms.py, for the encoder's output.
  """

  vocab: int
  cell: Cell
  d_model: int
  dropout: float = 0.0
  embedding_dropout: float = 0.0
  dtype: str = 'float32'
  embedding: Callable[..., nn.Module] = TiedEmbedding
  logits_divisor: float | None = None
  final_norm: Callable[..., nn.Module] = RMSNorm
  clear_state: bool = False
  head: Head | None = None
  encoder: nn.Module | None = None
  encoder_norm: Callable[..., nn.Module] = RMSNorm

  def setup(self):
    if self.clear_state and not self.cell.is_recurrent:
      raise ValueError(
        f'clear_state is True, but {type(self.cell).__name__} has no recurrent '
        'state. Remove model.Model.clear_state, or choose a recurrent '
        'architecture.'
      )
    if self.clear_state and (
      self.cell.needs_whole_document or self.encoder is not None
    ):
      raise ValueError(
        'clear_state is True, but each segment begins with an empty state '
        'anyway, because it holds whole documents. Remove '
        'model.Model.clear_state.'
      )
    if self.head is None and not self.cell.causal:
      raise ValueError(
        f'{type(self.cell).__name__} attends to future tokens, so it cannot '
        'predict the next token. Set CAUSAL = True, or choose a task with '
        'labels.'
      )
    self.embed = self.embedding(self.vocab, self.d_model, self.logits_divisor)
    if self.head is not None:
      self.head.check(self.embed)
    self.norm = self.final_norm(dtype=self.dtype)
    if self.encoder is not None:
      if self.head is not None:
        raise ValueError(
          'A model predicts a target with an encoder, or labels with a head, '
          'but not both. Remove model.Model.encoder or model.Model.head.'
        )
      self.source_norm = self.encoder_norm(dtype=self.dtype)
    elif self.encoder_norm is not RMSNorm:
      raise ValueError(
        f'encoder_norm is {self.encoder_norm!r}, but the model has no encoder. '
        'Remove model.Model.encoder_norm, or add an encoder such as '
        'options/encoder/transformer.'
      )
    check_rate('dropout', self.dropout, 'DROPOUT or model.Model.dropout')
    check_rate(
      'embedding_dropout',
      self.embedding_dropout,
      'model.Model.embedding_dropout',
    )
    self.drop = TiledDropout(self.dropout)
    self.drop_embedding = TiledDropout(self.embedding_dropout)

  @property
  def sequences(self) -> int:
    """Number of sequences in each row of the batch: 2 for pairs, else 1."""
    return 1 if self.head is None else self.head.sequences

  def initial_state(self, batch: int) -> State:
    """Returns the state at the start of `batch` documents."""
    rows, head = batch * self.sequences, None
    if self.head is not None:
      head = self.head.initial_state(rows, self.d_model)
    return self.join_state(self.cell.initial_state(rows), head)

  def __call__(self, state, tokens_BT, start_B, mask_BT, source_BS=None):
    """Returns the state after a segment, and its logits.

    A segment of a model with an encoder is a whole target in training: with the
    state () before it, the state after it is () too. With any other state, the
    segment continues a target.

    Args:
      state: the state before the segment.
      tokens_BT: int ids; for pairs, one sequence in each half of a row.
      start_B: bool, True at rows that begin a document; their state is reset.
      mask_BT: bool, False at padding.
      source_BS: int ids of the sources, 0 at padding; None without an encoder.

    Returns:
      The state, and logits_BTV float32 of the next token after each token, or
      of labels as the head defines them.

    Raises:
      ValueError: the segment, or each of its halves for pairs, is not a
        multiple of the block length.
    """
    B, T = tokens_BT.shape
    blocks = self.sequences * (self.cell.block_length or 1)
    if self.sequences > 1 and T % blocks:
      raise ValueError(
        f'A segment of pairs must be a multiple of {blocks} tokens, got {T}. '
        'Set SEGMENT.'
      )
    apart = lambda a_BT: a_BT.reshape(B * self.sequences, -1)
    block = self.block(apart(tokens_BT), apart(mask_BT))
    if self.encoder is not None:
      block = block.replace(source_kv=self.encode_source(source_BS))
    is_empty = isinstance(state, tuple) and not state
    is_whole = is_empty and self.encoder is not None
    if is_whole:
      state = self.initial_state(B)
    cell, head = reset(
      jnp.repeat(start_B, self.sequences),
      self.split_state(self.initial_state(B)),
      self.split_state(state),
    )
    if self.clear_state:
      cell = self.cell.clear(cell)
    cell, y_BTD = run(self.cell, cell, block)
    slots_after = lambda: self.cell.memory_slots(cell)
    head, logits_BTV = self.apply_head(head, y_BTD, block.mask, slots_after)
    if is_whole:
      return (), logits_BTV
    return self.join_state(cell, head), logits_BTV

  def encode_source(self, source_BS) -> Any:
    """Encodes sources; returns the Block.source_kv of their rows.

    Args:
      source_BS: int ids, 0 at padding.
    """
    block = self.block(source_BS, source_BS != 0)
    encoded_BSD = self.source_norm(self.encoder(block.x, block.mask))
    return self.cell.source_kv(encoded_BSD, block.mask)

  def parts(self, state: State) -> dict[str, Any]:
    """Returns the recurrent part of the cell's state; see Cell.parts."""
    return self.cell.parts(self.split_state(state)[0])

  def with_parts(self, state: State, parts: dict[str, Any]) -> State:
    """Returns the state, with these parts in place of its own.

    The head's state is kept. See Cell.with_parts.
    """
    cell, head = self.split_state(state)
    return self.join_state(self.cell.with_parts(cell, parts), head)

  def clear(self, state: State) -> State:
    """Returns the state after Cell.clear; the head's state is kept."""
    cell, head = self.split_state(state)
    return self.join_state(self.cell.clear(cell), head)

  def memory_slots(self, state: State) -> jax.Array | None:
    """Returns the cell's memory slots [B, S, D], or None if it has none.

    For pairs, the slots of both sequences of a row follow one another.
    """
    slots = self.cell.memory_slots(self.split_state(state)[0])
    if slots is None:
      return None
    return slots.reshape(-1, self.sequences * slots.shape[1], slots.shape[2])

  def to_decode_state(self, state: State) -> State:
    """Converts a state at a block boundary to one that `decode_step` takes."""
    cell, head = self.split_state(state)
    return self.join_state(self.cell.to_decode_state(cell), head)

  def decode_step(self, decode_state: State, tokens_B, source_kv=None):
    """Reads one token of each document.

    Args:
      decode_state: the result of `to_decode_state`, or of the previous call.
      tokens_B: int ids; [B, 2] for pairs.
      source_kv: the result of `encode_source`, or None without an encoder. If
        it has fewer than B rows, each serves equally many consecutive rows.

    Returns:
      The new decode state, and logits_BV float32 after this token. If the head
      pools memory slots, the logits are correct only at block boundaries.
    """
    tokens_B1 = tokens_B.reshape(-1, 1)
    block = self.block(tokens_B1, jnp.ones(tokens_B1.shape, bool))
    block = block.replace(source_kv=source_kv)
    cell, head = self.split_state(decode_state)
    cell, y_B1D = self.cell.decode_step(cell, block)
    slots_after = lambda: self.cell.memory_slots(
      self.cell.to_segment_state(cell)
    )
    head, logits_BTV = self.apply_head(head, y_B1D, block.mask, slots_after)
    return self.join_state(cell, head), logits_BTV[:, 0]

  def to_segment_state(self, decode_state: State) -> State:
    """Converts a decode state at a block boundary back to a state."""
    cell, head = self.split_state(decode_state)
    return self.join_state(self.cell.to_segment_state(cell), head)

  def block(self, tokens_BT, mask_BT) -> Block:
    """Embeds tokens and returns the cell's input."""
    x_BTD = self.embed(tokens_BT).astype(self.dtype)
    return Block(self.drop_embedding(x_BTD), mask_BT)

  def apply_head(self, head, y_BTD, mask_BT, slots_after):
    """Computes logits from the cell's outputs.

    Args:
      head: state of the head; None if the model has no head.
      y_BTD: outputs of the cell.
      mask_BT: bool, False at padding.
      slots_after: function that returns the cell's memory slots after these
        tokens. It returns None if the cell has no slots.

    Returns:
      The head's new state, or None without a head; and logits_BTV float32.
    """
    y_BTD = self.drop(self.norm(y_BTD)).astype(jnp.float32)
    # Without this barrier, XLA may fuse the norm's gradient with a product over
    # the vocabulary, which then takes twice as long by the estimate for a TPU.
    y_BTD = jax.lax.optimization_barrier(y_BTD)
    if self.head is None:
      with jax.named_scope('logits'):
        return None, self.embed.logits(y_BTD)

    def slots():
      s_BSD = slots_after()
      if s_BSD is None:
        raise ValueError(
          'This architecture has no memory slots to pool. Choose another of '
          'options/pool/*, or an architecture with memory slots.'
        )
      return self.norm(s_BSD).astype(jnp.float32)

    return self.head(head, y_BTD, mask_BT, slots)

  def split_state(self, state: State):
    """Returns (state of the cell, state of the head).

    The second is None if the model has no head. For pairs, every leaf is
    [2 B, ...], with one row per sequence.
    """
    if self.head is None:
      return state, None
    if self.sequences > 1:
      state = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), state)
    return state['cell'], state['head']

  def join_state(self, cell, head) -> State:
    """Undoes `split_state`: returns the state of the model."""
    state = cell if self.head is None else {'cell': cell, 'head': head}
    if self.sequences == 1:
      return state
    return jax.tree.map(lambda a: a.reshape(-1, 2, *a.shape[1:]), state)


def initialize(model: Model, rng: jax.Array, batch: int, segment: int):
  """Returns the parameters of a new model, drawn with `rng`.

  Args:
    model: the model.
    rng: random key.
    batch: number of rows of the segment on which Flax calls the model.
    segment: number of tokens in each row of this segment.
  """
  tokens_BT = jnp.zeros((batch, segment), jnp.int32)

  def initialize_all(m):
    state = m.initial_state(batch)
    start_B, mask_BT = jnp.ones(batch, bool), jnp.ones(tokens_BT.shape, bool)
    source_BS = None if model.encoder is None else tokens_BT
    return m(state, tokens_BT, start_B, mask_BT, source_BS)

  return model.init(rng, method=initialize_all)['params']


def empty_carry(model: Model, params, batch: int) -> State:
  """Returns zeros shaped as the model's state, the carry before the first step.

  The carry is the state that is passed from segment to segment. The zeros are
  never used, because the first segment of every row begins a document. The
  carry of a model with an encoder is ().
  """
  if model.encoder is not None:
    return ()
  shapes = jax.eval_shape(
    lambda p: model.apply({'params': p}, batch, method='initial_state'), params
  )
  return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
