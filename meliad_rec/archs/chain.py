"""Cells that run one after another, each over the whole segment."""

from collections.abc import Callable

from meliad_rec.cell import Cell
from meliad_rec.cell import run
from meliad_rec.dropout import drop_layer


class Chain(Cell, kw_only=True):
  """Base class: add `through` and `each`.

  Attributes:
    layer_drop: share of training steps without a cell, for each by itself; see
      dropout.drop_layer. A Chain in a Chain has its own.
  """

  layer_drop: float = 0.0

  @property
  def takes_segments(self):
    return True

  def initial_state(self, batch):
    return self.each(lambda cell: cell.initial_state(batch))

  def __call__(self, state, block):
    return self.through(self.run_or_drop, state, block)

  def clear(self, state):
    return self.each(lambda cell, s: cell.clear(s), state)

  def open(self, state):
    return self.each(lambda cell, s: cell.open(s), state)

  def step(self, opened, block):
    return self.through(lambda c, s, b: c.step(s, b), opened, block)

  def close(self, opened):
    return self.each(lambda cell, s: cell.close(s), opened)

  def run_or_drop(self, cell: Cell, state, block):
    """As cell.run, with LayerDrop."""
    state, y = run(cell, state, block)
    rate = 0.0 if isinstance(cell, Chain) else self.layer_drop
    return state, drop_layer(cell, rate, block.x, y)

  def through(self, call: Callable, state, block):
    """Feeds each cell, by call(cell, state, block), what the one below gave."""
    raise NotImplementedError

  def each(self, call: Callable, *state):
    """What call(cell, *its part of each state) gives for each cell."""
    raise NotImplementedError
