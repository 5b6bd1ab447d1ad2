"""Temporal Latent Bottleneck: a core in chunks, a memory between them.

Didolkar et al. 2022; "Investigating Recurrent Transformers with Dynamic Halt"
(2024), algorithms 2 and 4. TLB has a core of layers of their own, GUTLB one of
a gated layer that halts.

A cell run in chunks whose length follows from the document's.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from meliad_rec.layers.core_attention import Attention
from meliad_rec.layers.core_config import CoreConfig
from meliad_rec.layers.core_layer import MLP
from meliad_rec.layers.remat import remat
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import scan_blocks
from meliad_rec.models.cell import to_blocks


def zeros(rng, shape, dtype=jnp.float32):
  """First memory slots that are all alike, as in the authors' code."""
  del rng
  return jnp.zeros(shape, dtype)


class Writer(nn.Module):
  """A layer that writes a chunk into the memory.

  Attributes:
    config: sizes and choices; the MLP is as wide as the memory.
  """

  config: CoreConfig

  def setup(self):
    config = self.config
    self.attention = Attention(config, own=False)
    self.mlp_norm = config.norm(dtype=config.dtype)
    self.mlp = MLP(config, config.d_model)

  def __call__(self, m_BSD, y_BWD, mask_BW):
    """The memory, with what it reads from the chunk added."""
    m_BSD = self.attention(m_BSD, y_BWD, mask_BW)
    return m_BSD + self.mlp(self.mlp_norm(m_BSD))


class LatentBottleneck(Cell):
  """State: S memory slots, [B, S, D] float32; learned first ones.

  A row whose chunk is empty keeps its memory.

  Attributes:
    config: sizes, of the writers.
    core: x_BWD, mask_BW, memory_BSD -> y_BWD; of cores/, reading memory.
    slots: memory slots S.
    writers: layers that write.
    chunk: tokens of a chunk W; None: what a call is given, see chunks.py.
    first: draws the first slots, as small as first embeddings, where the
      authors' code has zeros: all alike they stay alike, as nothing but dropout
      tells them apart.
  """

  config: CoreConfig
  core: nn.Module
  slots: int
  writers: int = 1
  chunk: int | None = None
  first: nn.initializers.Initializer = nn.initializers.normal(0.02)

  @property
  def block_length(self):
    return self.chunk

  @property
  def takes_segments(self):
    return False

  @property
  def can_step(self):
    return False

  @property
  def causal(self):
    return self.core.causal

  @property
  def is_recurrent(self):
    return True

  def setup(self):
    if min(self.slots, self.writers) < 1:
      raise ValueError(
        f'There are {self.slots} memory slots and {self.writers} layers that '
        'write them; set SLOTS and WRITERS to 1 or more.'
      )
    if self.chunk is not None and self.chunk < 1:
      raise ValueError(
        f'Chunks have {self.chunk} tokens; set WINDOW to 1 or more.'
      )
    self.update = [Writer(self.config) for _ in range(self.writers)]
    shape = self.slots, self.config.d_model
    self.first_SD = self.param('first', self.first, shape)
    self.drop = self.config.dropout_kind(self.config.dropout)

  def initial_state(self, batch):
    return jnp.broadcast_to(self.first_SD, (batch, *self.first_SD.shape))

  def clear(self, state):
    return self.initial_state(len(state))

  def memory_slots(self, state):
    return state

  def __call__(self, state, block):
    read_BSD = state.astype(block.x.dtype)
    y_BWD = self.core(self.drop(block.x), block.mask, read_BSD)
    new_BSD = state  # What is added to it, chunk by chunk, stays float32.
    for write in self.update:
      new_BSD = write(new_BSD, y_BWD, block.mask)
    real_B = jnp.any(block.mask, 1)
    return jnp.where(real_B[:, None, None], new_BSD, state), y_BWD


class Chunks(Cell):
  """State: that of the cell. A segment is a document, in equal chunks.

  Attributes:
    cell: takes any number of tokens.
    length: tokens of a chunk at most; the fewest chunks of so many are made
      equally long, as in the code of the dynamic-halt paper. So the length
      changes with that of the segment: 86 of 100 at 512 tokens, 94 at 1,024.
    count: how many there are instead, however long; TLB-FR there has 5.
  """

  cell: Cell
  length: int | None = None
  count: int | None = None

  @property
  def takes_segments(self):
    return True

  @property
  def scans_blocks(self):
    return True

  @property
  def needs_whole_document(self):
    return True

  @property
  def can_step(self):
    return False

  @property
  def causal(self):
    return self.cell.causal

  @property
  def is_recurrent(self):
    return self.cell.is_recurrent

  def setup(self):
    given = [n for n in (self.length, self.count) if n is not None]
    if len(given) != 1 or given[0] < 1:
      raise ValueError(
        f'Chunks have length {self.length} and count {self.count}; set one of '
        'chunks.Chunks.length and count to 1 or more, and not the other.'
      )
    if self.cell.block_length is not None:
      raise ValueError(
        f'Chunks cuts segments itself, and {type(self.cell).__name__} takes '
        f'blocks of {self.cell.block_length} tokens; set '
        'latent_bottleneck.LatentBottleneck.chunk = None.'
      )

  def initial_state(self, batch):
    return self.cell.initial_state(batch)

  def clear(self, state):
    return self.cell.clear(state)

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
