"""Language model: token ids in, logits of the next token out."""

from collections.abc import Callable

from flax import linen as nn
import jax
import jax.numpy as jnp

from meliad_rec.cell import Block
from meliad_rec.cell import Cell
from meliad_rec.cell import run
from meliad_rec.cell import State
from meliad_rec.dropout import TiledDropout
from meliad_rec.embedding import TiedEmbedding
from meliad_rec.norms import RMSNorm
from meliad_rec.reset import reset


class LanguageModel(nn.Module):
  """Embedding, a cell, a norm, and logits by the embedding.

  Attributes:
    vocab: token ids; 0 is padding, and the input before a document's first.
    cell: the architecture.
    d_model: width.
    dropout: rate before the logits.
    dtype: of activations; logits are float32.
    embedding: a class of embedding.py.
    logits_divisor: see there; None for sqrt(d_model) where it is tied.
    final_norm: a class of norms.py.
    clear_state: the ablation that forgets what only recurrence carries at the
      start of each segment (Hutchins et al. 2022, section 4).
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

  def setup(self):
    if self.clear_state and not self.cell.recurs:
      raise ValueError(
        f'clear_state is set, and {type(self.cell).__name__} has no recurrent '
        'state to clear; leave it out, or take a recurrent architecture.'
      )
    self.embed = self.embedding(self.vocab, self.d_model, self.logits_divisor)
    self.norm = self.final_norm(dtype=self.dtype)
    self.drop = TiledDropout(self.dropout)

  def initial_state(self, batch: int) -> State:
    """State at the start of `batch` documents."""
    return self.cell.initial_state(batch)

  def __call__(self, state, tokens_BT, start_B, mask_BT):
    """The state after a segment, and the logits of the token behind each.

    Args:
      state: where the segment before left it.
      tokens_BT: int ids.
      start_B: bool, rows that begin a new document; their state is reset.
      mask_BT: bool, False at padding.

    Returns:
      State, logits_BTV float32.
    """
    state = reset(start_B, self.initial_state(tokens_BT.shape[0]), state)
    if self.clear_state:
      state = self.clear(state)
    state, y_BTD = run(self.cell, state, self.block(tokens_BT, mask_BT))
    return state, self.logits(y_BTD)

  def clear(self, state: State) -> State:
    """What `clear_state` makes of the state at the start of a segment."""
    return self.cell.clear(state)

  def open(self, state: State) -> State:
    """The state of a block border in the form that `step` takes."""
    return self.cell.open(state)

  def step(self, opened: State, tokens_B):
    """Reads one token a row: the opened state, and logits_BV of the next."""
    block = self.block(tokens_B[:, None], jnp.ones((len(tokens_B), 1), bool))
    opened, y_B1D = self.cell.step(opened, block)
    return opened, self.logits(y_B1D)[:, 0]

  def close(self, opened: State) -> State:
    """`open` undone, at a block border."""
    return self.cell.close(opened)

  def block(self, tokens_BT, mask_BT) -> Block:
    x_BTD = self.embed(tokens_BT).astype(self.dtype)
    return Block(x_BTD, mask_BT)

  def logits(self, y_BTD):
    y_BTD = self.drop(self.norm(y_BTD))
    return self.embed.logits(y_BTD.astype(jnp.float32))


def initialize(model: LanguageModel, rng: jax.Array, batch: int, segment: int):
  """Parameters of a new model, drawn with `rng`."""
  tokens_BT = jnp.zeros((batch, segment), jnp.int32)

  def both(m):
    state = m.initial_state(batch)
    start_B, mask_BT = jnp.ones(batch, bool), jnp.ones(tokens_BT.shape, bool)
    return m(state, tokens_BT, start_B, mask_BT)

  return model.init(rng, method=both)['params']


def empty_carry(model: LanguageModel, params, batch: int) -> State:
  """Zeros of the shapes that the model's state has.

  Which zeros never matters: every row's first segment begins a document.
  """
  shapes = jax.eval_shape(
    lambda p: model.apply({'params': p}, batch, method='initial_state'), params
  )
  return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
