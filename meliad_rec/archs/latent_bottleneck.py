"""Temporal Latent Bottleneck: a memory passed from chunk to chunk of a text.

Didolkar et al. 2022, and algorithms 2 and 4 of "Investigating Recurrent
Transformers with Dynamic Halt" (Ray Chowdhury and Caragea 2024). An encoder
reads each chunk and the memory; other layers then write the encoder's outputs
to the memory. The encoder of the Temporal Latent Bottleneck (TLB) is a stack of
layers with separate parameters (transformer.EncoderLayers). The encoder of its
gated universal form (GUTLB) is one gated layer that is repeated until it halts
(universal.Universal).
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from meliad_rec.layers.encoder_layer import EncoderAttention
from meliad_rec.layers.encoder_layer import EncoderMLP
from meliad_rec.layers.layer_config import EncoderConfig
from meliad_rec.layers.remat import remat
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import scan_blocks
from meliad_rec.models.cell import to_blocks


class LatentBottleneck(Cell):
  """State: S memory slots, [B, S, D] float32; the initial ones are learned.

  The blocks of this cell are called chunks. If a chunk of a row is all padding,
  the memory of that row does not change.

  Attributes:
    config: sizes and choices of the layers that write to the memory. Its rate
      of dropout also applies to the input of the encoder.
    encoder: module (x_BWD, mask_BW, memory_BSD) -> y_BWD, which reads the
      memory.
    slots: number of memory slots S.
    writers: number of layers that write to the memory, one after another.
    chunk: number of tokens W in a chunk. None means that each call reads one
      chunk of any length, as the cell `Chunks` requires. Outside of `Chunks`, a
      chunk is then a whole document.
    slots_init: initializer of the initial slots. The code of Ray Chowdhury and
      Caragea 2024 has zeros, but slots that begin equal stay equal, unless
      dropout makes them differ.
    writer_mlp_dim: number of hidden units of the MLP of layers that write. None
      means d_model, as in the code of Ray Chowdhury and Caragea 2024. In their
      algorithm 2, all MLPs have mlp_dim hidden units (equation 4).
  """

  config: EncoderConfig
  encoder: nn.Module
  slots: int
  writers: int = 1
  chunk: int | None = None
  slots_init: nn.initializers.Initializer = nn.initializers.normal(0.02)
  writer_mlp_dim: int | None = None

  is_recurrent = True
  takes_segments = False
  can_step = False

  @property
  def block_length(self):
    return self.chunk

  @property
  def causal(self):
    return self.encoder.causal

  @property
  def needs_whole_document(self):
    return self.chunk is None

  @property
  def shares_dropout(self):
    return not self.config.dropout_by_row

  def setup(self):
    if min(self.slots, self.writers) < 1:
      raise ValueError(
        f'slots and writers must be at least 1, got slots={self.slots}, '
        f'writers={self.writers}. Set SLOTS and WRITERS.'
      )
    if self.chunk is not None and self.chunk < 1:
      raise ValueError(
        f'chunk must be None or at least 1, got {self.chunk}. Set WINDOW.'
      )
    mlp_dim = self.writer_mlp_dim
    if mlp_dim is None:
      mlp_dim = self.config.d_model
    if mlp_dim < 1:
      raise ValueError(
        f'writer_mlp_dim must be at least 1, got {mlp_dim}. Set WRITER_MLP_DIM.'
      )
    self.update = [
      MemoryWriter(self.config, mlp_dim) for _ in range(self.writers)
    ]
    shape = self.slots, self.config.d_model
    self.initial_slots_SD = self.param('first', self.slots_init, shape)
    self.drop = self.config.dropout_kind(self.config.dropout)

  def initial_state(self, batch):
    shape = batch, *self.initial_slots_SD.shape
    return jnp.broadcast_to(self.initial_slots_SD, shape)

  def parts(self, state):
    return {'slots': state}

  def with_parts(self, state, parts):
    return parts['slots']

  def memory_slots(self, state):
    return state

  def __call__(self, state, block):
    memory_BSD = state.astype(block.x.dtype)
    y_BWD = self.encoder(self.drop(block.x), block.mask, memory_BSD)
    new_BSD = state  # Float32, because every chunk adds to it.
    for write in self.update:
      new_BSD = write(new_BSD, y_BWD, block.mask)
    real_B = jnp.any(block.mask, 1)
    return jnp.where(real_B[:, None, None], new_BSD, state), y_BWD


class MemoryWriter(nn.Module):
  """Layer that writes a chunk into the memory: the slots attend to the chunk.

  Attributes:
    config: sizes and choices, except the width of the MLP.
    mlp_dim: number of hidden units of the MLP.
  """

  config: EncoderConfig
  mlp_dim: int

  def setup(self):
    config = self.config
    self.attention = EncoderAttention(config, 'state_to_token')
    self.mlp_norm = config.norm(dtype=config.dtype)
    self.mlp = EncoderMLP(config, self.mlp_dim)

  def __call__(self, m_BSD, y_BWD, mask_BW):
    """Returns the memory [B, S, D] after a chunk.

    Args:
      m_BSD: the memory before the chunk.
      y_BWD: outputs of the encoder for the chunk.
      mask_BW: bool, False at padding.
    """
    m_BSD = self.attention(m_BSD, y_BWD, mask_BW)
    if self.config.post_norm:
      return self.mlp_norm(m_BSD + self.mlp(m_BSD))
    return m_BSD + self.mlp(self.mlp_norm(m_BSD))


class Chunks(Cell):
  """State: the state of `cell`, which reads a document in equal chunks.

  A segment must hold a whole document.

  Attributes:
    cell: a cell that takes any number of tokens.
    length: maximum number of tokens in a chunk. The segment is cut into as few
      chunks as possible, all equally long, as in the code of Ray Chowdhury and
      Caragea 2024. Padding fills the last one. The length of chunks thus
      depends on the segment: with a maximum of 100 tokens, chunks have 86
      tokens if the segment has 512, and 94 if it has 1,024.
    count: number of chunks, whatever the length of the segment. Set either
      `length` or `count`. The model TLB-FR of the same paper has 5 chunks.
  """

  cell: Cell
  length: int | None = None
  count: int | None = None

  takes_segments = True
  scans_blocks = True
  needs_whole_document = True
  can_step = False

  @property
  def causal(self):
    return self.cell.causal

  @property
  def is_recurrent(self):
    return self.cell.is_recurrent

  @property
  def shares_dropout(self):
    return self.cell.shares_dropout

  def setup(self):
    given = [n for n in (self.length, self.count) if n is not None]
    if len(given) != 1 or given[0] < 1:
      raise ValueError(
        'Chunks needs either length or count, at least 1, got length='
        f'{self.length}, count={self.count}. Set either '
        'latent_bottleneck.Chunks.length or latent_bottleneck.Chunks.count.'
      )
    if self.cell.block_length is not None:
      raise ValueError(
        f'Chunks needs a cell that takes any number of tokens, but '
        f'{type(self.cell).__name__} takes blocks of {self.cell.block_length}. '
        'Set latent_bottleneck.LatentBottleneck.chunk = None.'
      )

  def initial_state(self, batch):
    return self.cell.initial_state(batch)

  def parts(self, state):
    return self.cell.parts(state)

  def with_parts(self, state, parts):
    return self.cell.with_parts(state, parts)

  def memory_slots(self, state):
    return self.cell.memory_slots(state)

  def __call__(self, state, block):
    T = block.mask.shape[1]
    count = self.count or -(-T // self.length)
    W = -(-T // count)
    pad = lambda a: jnp.pad(
      a, ((0, 0), (0, count * W - T)) + ((0, 0),) * (a.ndim - 2)
    )
    blocks = jax.tree.map(lambda a: to_blocks(pad(a), W), block)
    read = lambda c, s, b: c.cell(s, b)
    read = remat(read, self.cell.remat, in_scan=True)
    state, y = scan_blocks(read, self, state, Block(blocks.x, blocks.mask))
    return state, y.reshape(len(y), count * W, *y.shape[3:])[:, :T]
