"""Cells on top of one another: a stack, or one cell repeated by a scan.

`Repeat` of a single layer with shared parameters is the Universal Transformer
that Ju et al. 2021 use as a baseline; of a stack of layers, it is the Ladder of
their first version. Unlike in Dehghani et al. 2019, the number of repeats is
fixed, and the layer does not know which repeat it is in. `Repeat` with separate
parameters is a stack of layers of the same kind. Its compile time does not grow
with the number of layers.
"""

from collections.abc import Callable
from collections.abc import Iterable
import functools
import itertools
import math
from typing import Any

from flax import linen as nn
import jax

from meliad_rec.distributed import weight_update
from meliad_rec.layers.dropout import drop_layer
from meliad_rec.layers.positions import T5Bias
from meliad_rec.metrics import pictures
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import mean_of_losses
from meliad_rec.models.cell import run


class Chain(Cell, kw_only=True):
  """Base class of Stack and Repeat: cells that run one after another.

  Subclasses implement `pass_through` and `map_cells`.

  Attributes:
    layer_drop: probability that each cell is skipped in a training step, drawn
      separately for each cell; see dropout.drop_layer. If a cell is itself a
      Chain, it is never skipped as a whole; its own layer_drop applies.
  """

  layer_drop: float = 0.0

  takes_segments = True

  def initial_state(self, batch):
    return self.map_cells(lambda cell: cell.initial_state(batch))

  def __call__(self, state, block):
    return self.pass_through(self.run_or_drop, state, block)

  def source_kv(self, encoded_BSD, mask_BS):
    return self.map_cells(lambda cell: cell.source_kv(encoded_BSD, mask_BS))

  def clear(self, state):
    return self.map_cells(lambda cell, s: cell.clear(s), state)

  def to_decode_state(self, state):
    return self.map_cells(lambda cell, s: cell.to_decode_state(s), state)

  def decode_step(self, decode_state, block):
    step = lambda cell, s, b: cell.decode_step(s, b)
    return self.pass_through(step, decode_state, block)

  def to_segment_state(self, decode_state):
    return self.map_cells(
      lambda cell, s: cell.to_segment_state(s), decode_state
    )

  def run_or_drop(self, cell: Cell, state, block):
    """Runs one cell over a segment, with LayerDrop.

    Returns:
      The new state; and y_BTD, which is block.x if the cell is skipped.
    """
    state, y = run(cell, state, block)
    rate = 0.0 if isinstance(cell, Chain) else self.layer_drop
    return state, drop_layer(cell, rate, block.x, y)

  def pass_through(self, call: Callable, state, block):
    """Runs the cells in order, each on the outputs of the cell before it.

    Args:
      call: function (cell, its state, block) -> (new state, y_BTD).
      state: the states of all cells.
      block: input of the first cell.

    Returns:
      The new states, and y_BTD of the last cell.
    """
    raise NotImplementedError

  def map_cells(self, call: Callable, *state):
    """Calls a function for each cell, and combines the results.

    Args:
      call: function (cell, *parts) -> result. `parts` are the parts of the
        states that belong to the cell.
      *state: any number of states of the whole chain.

    Returns:
      The results of all cells, arranged like the states of all cells in a state
      of the whole chain.
    """
    raise NotImplementedError


class Repeat(Chain):
  """State: the cell's state in each of `count` repeats, stacked along axis 1.

  Attributes:
    cell: the repeated cell.
    count: how many times the cell runs.
    share: whether all repeats share their parameters. If True, the losses that
      the repeats sow are averaged. If False, these losses are summed, and the
      parameters of all repeats are stacked along axis 0.
    layer_drop: see Chain.
  """

  cell: Cell
  count: int
  share: bool = False

  def setup(self):
    if self.count < 1:
      raise ValueError(
        f'count must be at least 1, got {self.count}. Set REPEATS.'
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

  def parts(self, state):
    return self.map_cells(lambda cell, s: cell.parts(s), state)

  def with_parts(self, state, parts):
    put = lambda cell, s, p: cell.with_parts(s, p)
    return self.map_cells(put, state, parts)

  def memory_slots(self, state):
    """Returns the memory slots of the last repeat."""
    return self.cell.memory_slots(jax.tree.map(lambda a: a[:, -1], state))

  def pass_through(self, call, state, block):
    def body(cell, x_BTD, s, kv):
      s, y_BTD = call(cell, s, block.replace(x=x_BTD, source_kv=kv))
      return y_BTD, s

    if not self.share and not self.is_initializing():
      body = nn.map_variables(body, 'params', trans_in_fn=weight_update.one_use)
    own = {} if self.share else {'params': 0}
    scan = nn.scan(
      mean_of_losses(body, self.count) if self.share else body,
      variable_axes={'losses': 0, 'metrics': 0} | pictures.STACKED | own,
      variable_broadcast='params' if self.share else False,
      split_rngs={'params': not self.share, 'dropout': True},
      in_axes=1,
      out_axes=1,
      length=self.count,
    )
    if not self.share and not self.is_initializing():
      scan = nn.map_variables(scan, 'params', trans_in_fn=self.cell.cast_params)
    y_BTD, state = scan(self.cell, block.x, state, block.source_kv)
    return state, y_BTD

  def map_cells(self, call, *state):
    return nn.vmap(
      call,
      variable_axes={'params': None if self.share else 0},
      split_rngs={'params': not self.share},
      in_axes=1,
      out_axes=1,
      axis_size=self.count,
    )(self.cell, *state)


class Stack(Chain):
  """State: a tuple of the cells' states.

  Attributes:
    cells: the cells in order; the first reads the input.
    layer_drop: see Chain.
  """

  cells: tuple[Cell, ...]

  @property
  def block_length(self):
    lengths = [c.block_length for c in self.cells if c.block_length]
    return math.lcm(*lengths) if lengths else None

  @property
  def block_setting(self):
    settings = {c.block_setting for c in self.cells if c.block_length}
    return ' and of '.join(sorted(settings))

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

  @property
  def firsts(self) -> list[int]:
    """The index of each cell's first layer; a Repeat has several layers."""
    counts = [c.count if isinstance(c, Repeat) else 1 for c in self.cells]
    return list(itertools.accumulate(counts[:-1], initial=0))

  def parts(self, state):
    of_cells = self.map_cells(lambda cell, s: cell.parts(s), state)
    return named_by_layer(zip(self.firsts, of_cells, strict=True))

  def with_parts(self, state, parts):
    put = lambda cell, s, p: cell.with_parts(s, p)
    of_cells = [parts_of_layer(parts, i) for i in self.firsts]
    return self.map_cells(put, state, of_cells)

  def memory_slots(self, state):
    """Returns the memory slots of the highest recurrent cell."""
    pairs = zip(self.cells, state, strict=True)
    recurrent = [(cell, s) for cell, s in pairs if cell.is_recurrent]
    cell, s = recurrent[-1] if recurrent else (self.cells[-1], state[-1])
    return cell.memory_slots(s)

  def pass_through(self, call, state, block):
    new, y_BTD = [], block.x
    sources = block.source_kv or (None,) * len(self.cells)
    for cell, s, kv in zip(self.cells, state, sources, strict=True):
      s, y_BTD = call(cell, s, block.replace(x=y_BTD, source_kv=kv))
      new.append(s)
    return tuple(new), y_BTD

  def map_cells(self, call, *state):
    groups = zip(self.cells, *state, strict=True)
    return tuple(call(*group) for group in groups)


def named_by_layer(layers: Iterable[tuple[int, dict]]) -> dict[str, Any]:
  """Joins the parts of layers' states: {'layer_2/slots': ...}.

  Args:
    layers: (index, result of Cell.parts) of each layer.
  """
  return {
    f'layer_{i}/{name}': part
    for i, parts in layers
    for name, part in parts.items()
  }


def parts_of_layer(parts: dict[str, Any], i: int) -> dict[str, Any]:
  """Returns the parts of layer i, with the names that they have in the layer.

  Args:
    parts: the result of `named_by_layer`.
    i: index of the layer.
  """
  own = f'layer_{i}/'
  return {
    name.removeprefix(own): part
    for name, part in parts.items()
    if name.startswith(own)
  }


def _shared(position, layer, special) -> nn.Module:
  """Returns the position module that layers share; for errors see `layers`."""
  if special:
    raise ValueError(
      'stack.layers.position is for layers of one kind, but there are special '
      'layers. Remove it, or choose an architecture without RECURRENT_LAYERS.'
    )
  made, config = position(), getattr(layer(), 'config', None)
  own = config and type(config.position(config.num_heads))
  if own not in (None, T5Bias, type(made)):  # T5Bias is the default.
    raise ValueError(
      f'stack.layers.position is {type(made).__name__}, but '
      f'layer_config.LayerConfig.position is {own.__name__}. Remove one of the '
      'two, or set stack.layers.position = None.'
    )
  return made


def layers(
  count: int,
  layer: Callable[[], Cell],
  special: Callable[[], Cell] | None = None,
  special_at: tuple[int, ...] = (),
  scan: bool = False,
  layer_drop: float = 0.0,
  position: Callable[[], nn.Module] | None = None,
) -> Stack:
  """Returns a stack of `count` layers, some of them special.

  Args:
    count: number of layers.
    layer: makes an ordinary layer.
    special: makes a special layer, such as a recurrent one.
    special_at: indices of the special layers, from 0 at the bottom; negative
      ones count from the top, which is -1.
    scan: whether consecutive layers of the same kind become one `Repeat`.
    layer_drop: probability that each layer is skipped in a training step.
    position: makes one position module that all layers share. None means that
      each layer makes its own.

  Raises:
    ValueError: there are no layers; only one of special and special_at is
      given; an index is outside the stack or given twice; or position is set
      together with scan, special layers, or layers with positions of another
      kind.
  """
  if count < 1:
    raise ValueError(f'count must be at least 1, got {count}. Set LAYERS.')
  if bool(special_at) != bool(special):
    raise ValueError(
      f'special_at is {tuple(special_at)}, but special is '
      f'{"given" if special else "not given"}. Set both stack.layers.special '
      'and RECURRENT_LAYERS, or neither.'
    )
  if position and scan:
    raise ValueError(
      'Scanned layers cannot share a position module. Remove either '
      'stack.layers.scan or stack.layers.position.'
    )
  if position:
    layer = functools.partial(layer, position=_shared(position, layer, special))
  special_at = special_places(count, special_at)
  cells = []
  for is_special, group in itertools.groupby(
    range(count), set(special_at).__contains__
  ):
    kind, repeats = special if is_special else layer, len(list(group))
    if scan and repeats > 1:
      cells.append(Repeat(kind(), repeats, layer_drop=layer_drop))
    else:
      cells += [kind() for _ in range(repeats)]
  return Stack(tuple(cells), layer_drop=layer_drop)


def special_places(count: int, places: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the sorted indices of special layers, counted from 0.

  Args:
    count: number of layers.
    places: indices; negative ones count from the top, which is -1.

  Raises:
    ValueError: an index is outside the stack, or given twice.
  """
  known = sorted({i % count for i in places if -count <= i < count})
  if len(known) != len(places):
    raise ValueError(
      f'Indices of special layers must differ and be from {-count} to '
      f'{count - 1}, got {places}. Set RECURRENT_LAYERS.'
    )
  return tuple(known)
