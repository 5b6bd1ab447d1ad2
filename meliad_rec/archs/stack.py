"""Cells on top of one another."""

from collections.abc import Callable
import math

from flax import linen as nn

from meliad_rec.cell import Cell
from meliad_rec.cell import run


class Stack(Cell):
  """State: a tuple of the cells' states. Each cell runs over all T in turn."""

  cells: tuple[Cell, ...]

  @property
  def block_length(self):
    lengths = [c.block_length for c in self.cells if c.block_length]
    return math.lcm(*lengths) if lengths else None

  @property
  def takes_segments(self):
    return True

  @property
  def recurs(self):
    return any(cell.recurs for cell in self.cells)

  @property
  def streams(self):
    return all(cell.streams for cell in self.cells)

  def initial_state(self, batch):
    return tuple(cell.initial_state(batch) for cell in self.cells)

  def __call__(self, state, block):
    return self.through(run, state, block)

  def clear(self, state):
    return self.each('clear', state)

  def open(self, state):
    return self.each('open', state)

  def step(self, opened, block):
    return self.through(lambda c, s, b: c.step(s, b), opened, block)

  def close(self, opened):
    return self.each('close', opened)

  def through(self, call: Callable, state, block):
    """Feeds each cell what the one below gave."""
    new = []
    for cell, s in zip(self.cells, state, strict=True):
      s, y = call(cell, s, block)
      block = block.replace(x=y)
      new.append(s)
    return tuple(new), block.x

  def each(self, method: str, state):
    pairs = zip(self.cells, state, strict=True)
    return tuple(getattr(cell, method)(s) for cell, s in pairs)


class Repeat(Cell):
  """State: that of `count` like cells, stacked along axis 1.

  One scan over the cells, whose parameters are stacked along axis 0, so that
  the time to compile does not grow with their number.
  """

  cell: Cell
  count: int

  @property
  def block_length(self):
    return self.cell.block_length

  @property
  def takes_segments(self):
    return True

  @property
  def recurs(self):
    return self.cell.recurs

  @property
  def streams(self):
    return self.cell.streams

  def initial_state(self, batch):
    return self.each(lambda cell: cell.initial_state(batch))

  def __call__(self, state, block):
    return self.through(run, state, block)

  def clear(self, state):
    return self.each(lambda cell, s: cell.clear(s), state)

  def open(self, state):
    return self.each(lambda cell, s: cell.open(s), state)

  def step(self, opened, block):
    return self.through(lambda c, s, b: c.step(s, b), opened, block)

  def close(self, opened):
    return self.each(lambda cell, s: cell.close(s), opened)

  def through(self, call: Callable, state, block):
    def body(cell, x, s):
      s, y = call(cell, s, block.replace(x=x))
      return y, s

    scan = nn.scan(
      body,
      variable_axes={'params': 0},
      split_rngs={'params': True, 'dropout': True},
      in_axes=1,
      out_axes=1,
      length=self.count,
    )
    y, state = scan(self.cell, block.x, state)
    return state, y

  def each(self, call: Callable, *state):
    return nn.vmap(
      call,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      in_axes=1,
      out_axes=1,
      axis_size=self.count,
    )(self.cell, *state)


def layers(
  count: int,
  layer: Callable[[], Cell],
  special: Callable[[], Cell] | None = None,
  special_at: tuple[int, ...] = (),
  scan: bool = False,
) -> Stack:
  """A stack of `count` layers, some of them special.

  Args:
    count: layers in all.
    layer: makes an ordinary layer.
    special: makes a special one.
    special_at: where those stand, from 0; negative places count from the top.
    scan: whether neighbours that are alike become one `Repeat`.

  Raises:
    ValueError: no layers, special layers without a place or the reverse, or a
      place that is outside the stack or named twice.
  """
  if count < 1:
    raise ValueError(f'A stack of {count} layers; set LAYERS to 1 or more.')
  if bool(special_at) != bool(special):
    raise ValueError(
      f'Special layers stand at {tuple(special_at)}, and '
      f'{"one" if special else "none"} is given; set both of '
      'stack.layers.special and RECURRENT_LAYERS, or neither.'
    )
  special_at = special_places(count, special_at)
  kinds = [special if i in special_at else layer for i in range(count)]
  cells = []
  while kinds:
    kind = kinds.pop(0)
    alike = 1
    while scan and kinds and kinds[0] is kind:
      kinds.pop(0)
      alike += 1
    cells.append(Repeat(kind(), alike) if alike > 1 else kind())
  return Stack(tuple(cells))


def special_places(count: int, places: tuple[int, ...]) -> tuple[int, ...]:
  """Places counted from 0, in order; -1 is the top of `count` layers."""
  found = sorted({i % count for i in places if -count <= i < count})
  if len(found) != len(places):
    raise ValueError(
      f'Special layers at {places}; there are {count} layers, so give '
      f'different places from {-count} to {count - 1}. Set RECURRENT_LAYERS.'
    )
  return tuple(found)
