"""Cells on top of one another.

Cells that run one after another, each over the whole segment.

One cell run several times in depth, by one scan.

With the parameters of all it is the Universal Transformer of Ju et al. 2021: no
vector tells the repeats apart, and their number is fixed, as in their baseline,
and not as in Dehghani et al. 2019. With parameters of its own for each, it is a
stack of like layers, whose time to compile does not grow with their number.
"""

from collections.abc import Callable
import functools
import math

from flax import linen as nn
import jax

from meliad_rec.layers.dropout import drop_layer
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import mean_of_losses
from meliad_rec.models.cell import run


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

  def to_decode_state(self, state):
    return self.each(lambda cell, s: cell.to_decode_state(s), state)

  def decode_step(self, opened, block):
    return self.through(lambda c, s, b: c.decode_step(s, b), opened, block)

  def to_segment_state(self, opened):
    return self.each(lambda cell, s: cell.to_segment_state(s), opened)

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


class Repeat(Chain):
  """State: that of the cell in each of `count` repeats, stacked along axis 1.

  Attributes:
    cell: what is repeated.
    count: how often it runs.
    share: whether all repeats have the same parameters, and of the losses that
      they sow the mean counts: what a parameter costs, it costs once. If not,
      parameters of all are stacked along axis 0, and the sum counts.
    layer_drop: see Chain.
  """

  cell: Cell
  count: int
  share: bool = False

  def setup(self):
    if self.count < 1:
      raise ValueError(
        f'The core is repeated {self.count} times; set REPEATS to 1 or more.'
      )

  @property
  def block_length(self):
    return self.cell.block_length

  @property
  def block_setting(self):
    return self.cell.block_setting

  @property
  def causal(self):
    return self.cell.causal

  @property
  def needs_whole_document(self):
    return self.cell.needs_whole_document

  @property
  def is_recurrent(self):
    return self.cell.is_recurrent

  @property
  def can_step(self):
    return self.cell.can_step

  def memory_slots(self, state):
    """That of the last repeat."""
    return self.cell.memory_slots(jax.tree.map(lambda a: a[:, -1], state))

  def through(self, call, state, block):
    def body(cell, x_BTD, s):
      s, y_BTD = call(cell, s, block.replace(x=x_BTD))
      return y_BTD, s

    own = {} if self.share else {'params': 0}
    scan = nn.scan(
      mean_of_losses(body, self.count) if self.share else body,
      variable_axes={'losses': 0, 'figures': 0, 'pictures': 0} | own,
      variable_broadcast='params' if self.share else False,
      split_rngs={'params': not self.share, 'dropout': True},
      in_axes=1,
      out_axes=1,
      length=self.count,
    )
    y_BTD, state = scan(self.cell, block.x, state)
    return state, y_BTD

  def each(self, call, *state):
    return nn.vmap(
      call,
      variable_axes={'params': None if self.share else 0},
      split_rngs={'params': not self.share},
      in_axes=1,
      out_axes=1,
      axis_size=self.count,
    )(self.cell, *state)


class Stack(Chain):
  """State: a tuple of the cells' states."""

  cells: tuple[Cell, ...]

  @property
  def block_length(self):
    lengths = [c.block_length for c in self.cells if c.block_length]
    return math.lcm(*lengths) if lengths else None

  @property
  def block_setting(self):
    found = {c.block_setting for c in self.cells if c.block_length}
    return ' and of '.join(sorted(found))

  @property
  def causal(self):
    return all(cell.causal for cell in self.cells)

  @property
  def needs_whole_document(self):
    return any(cell.needs_whole_document for cell in self.cells)

  @property
  def is_recurrent(self):
    return any(cell.is_recurrent for cell in self.cells)

  @property
  def can_step(self):
    return all(cell.can_step for cell in self.cells)

  def memory_slots(self, state):
    """That of the highest cell that recurs."""
    pairs = zip(self.cells, state, strict=True)
    recurrent = [(cell, s) for cell, s in pairs if cell.is_recurrent]
    cell, s = recurrent[-1] if recurrent else (self.cells[-1], state[-1])
    return cell.memory_slots(s)

  def through(self, call, state, block):
    new = []
    for cell, s in zip(self.cells, state, strict=True):
      s, y = call(cell, s, block)
      block = block.replace(x=y)
      new.append(s)
    return tuple(new), block.x

  def each(self, call, *state):
    groups = zip(self.cells, *state, strict=True)
    return tuple(call(*group) for group in groups)


def layers(
  count: int,
  layer: Callable[[], Cell],
  special: Callable[[], Cell] | None = None,
  special_at: tuple[int, ...] = (),
  scan: bool = False,
  layer_drop: float = 0.0,
  position: Callable[[], nn.Module] | None = None,
) -> Stack:
  """A stack of `count` layers, some of them special.

  Args:
    count: layers in all.
    layer: makes an ordinary layer.
    special: makes a special one.
    special_at: where those stand, from 0; negative places count from the top.
    scan: whether neighbours that are alike become one `Repeat`.
    layer_drop: share of training steps without a layer, for each.
    position: makes the one position module of all ordinary layers; None: each
      has its own.

  Raises:
    ValueError: no layers, special layers without a place or the reverse, a
      place that is outside the stack or named twice, or one position module
      for layers that are scanned.
  """
  if count < 1:
    raise ValueError(f'A stack of {count} layers; set LAYERS to 1 or more.')
  if bool(special_at) != bool(special):
    raise ValueError(
      f'Special layers stand at {tuple(special_at)}, and '
      f'{"one" if special else "none"} is given; set both of '
      'stack.layers.special and RECURRENT_LAYERS, or neither.'
    )
  if position and scan:
    raise ValueError(
      'Layers that are scanned cannot share a position module; leave out '
      'stack.layers.scan or stack.layers.position.'
    )
  if position:
    layer = functools.partial(layer, position=position())
  special_at = special_places(count, special_at)
  kinds = [special if i in special_at else layer for i in range(count)]
  cells = []
  while kinds:
    kind = kinds.pop(0)
    alike = 1
    while scan and kinds and kinds[0] is kind:
      kinds.pop(0)
      alike += 1
    cells.append(
      Repeat(kind(), alike, layer_drop=layer_drop) if alike > 1 else kind()
    )
  return Stack(tuple(cells), layer_drop=layer_drop)


def special_places(count: int, places: tuple[int, ...]) -> tuple[int, ...]:
  """Places counted from 0, in order; -1 is the top of `count` layers."""
  found = sorted({i % count for i in places if -count <= i < count})
  if len(found) != len(places):
    raise ValueError(
      f'Special layers at {places}; there are {count} layers, so give '
      f'different places from {-count} to {count - 1}. Set RECURRENT_LAYERS.'
    )
  return tuple(found)
