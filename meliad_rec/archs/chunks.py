"""A cell run in chunks whose length follows from the document's."""

import jax
import jax.numpy as jnp

from meliad_rec.cell import Block
from meliad_rec.cell import Cell
from meliad_rec.cell import scan_blocks
from meliad_rec.cell import to_blocks
from meliad_rec.remat import remat


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
  def whole_documents(self):
    return True

  @property
  def streams(self):
    return False

  @property
  def causal(self):
    return self.cell.causal

  @property
  def recurs(self):
    return self.cell.recurs

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

  def summary(self, state):
    return self.cell.summary(state)

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
