"""The model: token ids in, logits of the next token or of labels out.

A row of a segment may hold the two sequences of a pair, side by side: each is
then a row of its own for cell and head. With a head the state is {'cell': ...,
'head': ...}; every leaf is [B, ...], of pairs [B, 2, ...].
"""

from collections.abc import Callable

from flax import linen as nn
import jax
import jax.numpy as jnp

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
  """Embedding, a cell, a norm, and logits by the embedding or a head.

  Attributes:
    vocab: token ids; 0 is padding, and the input before a document's first.
    cell: the architecture.
    d_model: width.
    dropout: rate before the logits.
    dtype: of activations; logits are float32.
    embedding: a class of embedding.py.
    logits_divisor: see there; None for sqrt(d_model) where it is tied.
    final_norm: a class of norms.py; also of memory slots that a head pools.
    clear_state: the ablation that forgets what only recurrence carries at the
      start of each segment (Hutchins et al. 2022, section 4).
    head: of heads.py; None: logits are of the next token.
  """

  vocab: int
  cell: Cell
  d_model: int
  dropout: float = 0.0
  dtype: str = 'float32'
  embedding: Callable[..., nn.Module] = TiedEmbedding
  logits_divisor: float | None = None
  final_norm: Callable[..., nn.Module] = RMSNorm
  clear_state: bool = False
  head: Head | None = None

  def setup(self):
    if self.clear_state and not self.cell.is_recurrent:
      raise ValueError(
        f'clear_state is set, and {type(self.cell).__name__} has no recurrent '
        'state to clear; leave it out, or take a recurrent architecture.'
      )
    if self.head is None and not self.cell.causal:
      raise ValueError(
        f'{type(self.cell).__name__} lets tokens see later ones, which a model '
        'of the next token must not; set CAUSAL = True, or give the model a '
        'head.'
      )
    self.embed = self.embedding(self.vocab, self.d_model, self.logits_divisor)
    if self.head is not None:
      self.head.check(self.embed)
    self.norm = self.final_norm(dtype=self.dtype)
    self.drop = TiledDropout(self.dropout)

  @property
  def sequences(self) -> int:
    """How many a row of a segment holds: 2 for pairs, else 1."""
    return 1 if self.head is None else self.head.sequences

  def initial_state(self, batch: int) -> State:
    """State at the start of `batch` documents."""
    rows, head = batch * self.sequences, None
    if self.head is not None:
      head = self.head.initial_state(rows, self.d_model)
    return self.join_state(self.cell.initial_state(rows), head)

  def __call__(self, state, tokens_BT, start_B, mask_BT):
    """The state after a segment, and its logits.

    Args:
      state: where the segment before left it.
      tokens_BT: int ids; of pairs, half of them of each sequence.
      start_B: bool, rows that begin a new document; their state is reset.
      mask_BT: bool, False at padding.

    Returns:
      State, logits_BTV float32: of the token behind each, or see the head.

    Raises:
      ValueError: halves of a segment of pairs are no whole blocks.
    """
    B, T = tokens_BT.shape
    blocks = self.sequences * (self.cell.block_length or 1)
    if self.sequences > 1 and T % blocks:
      raise ValueError(
        f'Pairs have half of a segment, in whole blocks, for each sequence, '
        f'and it has {T} places; set SEGMENT to a multiple of {blocks}.'
      )
    apart = lambda a_BT: a_BT.reshape(B * self.sequences, -1)
    block = self.block(apart(tokens_BT), apart(mask_BT))
    cell, head = reset(
      jnp.repeat(start_B, self.sequences),
      self.split_state(self.initial_state(B)),
      self.split_state(state),
    )
    if self.clear_state:
      cell = self.cell.clear(cell)
    cell, y_BTD = run(self.cell, cell, block)
    summary = lambda: self.cell.memory_slots(cell)
    head, logits_BTV = self.apply_head(head, y_BTD, block.mask, summary)
    return self.join_state(cell, head), logits_BTV

  def clear(self, state: State) -> State:
    """What `clear_state` makes of a segment's first state; a pool stays."""
    cell, head = self.split_state(state)
    return self.join_state(self.cell.clear(cell), head)

  def to_decode_state(self, state: State) -> State:
    """The state of a block border in the form that `step` takes."""
    cell, head = self.split_state(state)
    return self.join_state(self.cell.to_decode_state(cell), head)

  def decode_step(self, opened: State, tokens_B):
    """Reads tokens_B, one of each document, or [B, 2], one of each sequence.

    Returns the opened state, and logits_BV. Memory slots that a head pools are
    right at block borders alone.
    """
    tokens_B1 = tokens_B.reshape(-1, 1)
    block = self.block(tokens_B1, jnp.ones(tokens_B1.shape, bool))
    cell, head = self.split_state(opened)
    cell, y_B1D = self.cell.decode_step(cell, block)
    summary = lambda: self.cell.memory_slots(self.cell.to_segment_state(cell))
    head, logits_BTV = self.apply_head(head, y_B1D, block.mask, summary)
    return self.join_state(cell, head), logits_BTV[:, 0]

  def to_segment_state(self, opened: State) -> State:
    """`open` undone, at a block border."""
    cell, head = self.split_state(opened)
    return self.join_state(self.cell.to_segment_state(cell), head)

  def block(self, tokens_BT, mask_BT) -> Block:
    x_BTD = self.embed(tokens_BT).astype(self.dtype)
    return Block(x_BTD, mask_BT)

  def apply_head(self, head, y_BTD, mask_BT, summary):
    """The head's state behind outputs of the cell, and logits_BTV."""
    y_BTD = self.drop(self.norm(y_BTD)).astype(jnp.float32)
    if self.head is None:
      return None, self.embed.logits(y_BTD)
    slots = lambda: self.norm(summary()).astype(jnp.float32)
    return self.head(head, y_BTD, mask_BT, slots)

  def split_state(self, state: State):
    """The cell's state and the head's, or None; of pairs, rows [2 B, ...]."""
    if self.head is None:
      return state, None
    if self.sequences > 1:
      state = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), state)
    return state['cell'], state['head']

  def join_state(self, cell, head) -> State:
    """`split` undone."""
    state = cell if self.head is None else {'cell': cell, 'head': head}
    if self.sequences == 1:
      return state
    return jax.tree.map(lambda a: a.reshape(-1, 2, *a.shape[1:]), state)


def initialize(model: Model, rng: jax.Array, batch: int, segment: int):
  """Parameters of a new model, drawn with `rng`."""
  tokens_BT = jnp.zeros((batch, segment), jnp.int32)

  def both(m):
    state = m.initial_state(batch)
    start_B, mask_BT = jnp.ones(batch, bool), jnp.ones(tokens_BT.shape, bool)
    return m(state, tokens_BT, start_B, mask_BT)

  return model.init(rng, method=both)['params']


def empty_carry(model: Model, params, batch: int) -> State:
  """Zeros of the shapes that the model's state has.

  Which zeros never matters: every row's first segment begins a document.
  """
  shapes = jax.eval_shape(
    lambda p: model.apply({'params': p}, batch, method='initial_state'), params
  )
  return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
