"""Block feedback: every layer also reads the recurrent states.

Hutchins et al. 2022, section 3.6: the whole stack runs block by block, and each
layer attends to the states that the recurrent layer left one block before.
"""

from collections.abc import Callable
import functools

from flax import linen as nn

from meliad_rec import gates
from meliad_rec.archs.block_recurrent import BlockRecurrentLayer
from meliad_rec.archs.stack import special_places
from meliad_rec.attention import KV
from meliad_rec.cell import Block
from meliad_rec.cell import Cell
from meliad_rec.layer import Layer
from meliad_rec.layer_config import LayerConfig


class ReadingLayer(nn.Module):
  """A window layer that also reads memory; its state is a window cache."""

  config: LayerConfig

  def setup(self):
    self.layer = Layer(self.config, has_memory=True)

  def __call__(self, past: KV, block: Block, memory: KV):
    n_BTD = self.layer.enter(block.x)
    kv = past.append(self.layer.kv(n_BTD, block.mask))
    y_BTD = self.layer(block.x, n_BTD, kv, memory)
    return kv.last(self.config.window), y_BTD


class BlockFeedback(Cell):
  """State: a window cache per plain layer, and that of each recurrent layer.

  Attributes:
    config: sizes.
    count: layers in all.
    recurrent_at: places of the recurrent layers; negative ones count from the
      top. The states of the last one feed back.
    slots, gate, gate_config: see StateVectors.
  """

  config: LayerConfig
  count: int
  recurrent_at: tuple[int, ...]
  slots: int
  gate: Callable[..., nn.Module] = gates.FixedGate
  gate_config: str = 'skip'

  @property
  def block_length(self):
    return self.config.window

  @property
  def streams(self):
    return True

  def setup(self):
    if not self.recurrent_at:
      raise ValueError(
        'Block feedback needs a recurrent layer; set RECURRENT_LAYERS.'
      )
    self.places = special_places(self.count, self.recurrent_at)
    recurrent = functools.partial(
      BlockRecurrentLayer,
      self.config,
      self.slots,
      self.gate,
      self.gate_config,
      hoist=False,
    )
    self.layers = [
      recurrent() if i in self.places else ReadingLayer(self.config)
      for i in range(self.count)
    ]

  def initial_state(self, batch):
    return tuple(
      layer.initial_state(batch)
      if i in self.places
      else self.config.empty_past(batch)
      for i, layer in enumerate(self.layers)
    )

  def __call__(self, state, block):
    fed_back = self.places[-1]
    n_BSD, memory = self.layers[fed_back].seen(state[fed_back])

    def recur(layer, s, block):
      if layer is self.layers[fed_back]:
        return layer.one_block(s, block, n_BSD, memory)
      return layer(s, block)

    return self.through(recur, state, block, memory)

  def clear(self, state):
    return self.each('clear', state)

  def open(self, state):
    return self.each('open', state)

  def step(self, opened, block):
    memory = opened[self.places[-1]].memory
    return self.through(lambda c, s, b: c.step(s, b), opened, block, memory)

  def close(self, opened):
    return self.each('close', opened)

  def through(self, recur: Callable, state, block, memory):
    """Feeds each layer what the one below gave, and the states to all."""
    new = []
    for i, (layer, s) in enumerate(zip(self.layers, state, strict=True)):
      if i in self.places:
        s, y_BTD = recur(layer, s, block)
      else:
        s, y_BTD = layer(s, block, memory)
      block = block.replace(x=y_BTD)
      new.append(s)
    return tuple(new), block.x

  def each(self, method: str, state):
    """A method of the recurrent layers' on their states."""
    return tuple(
      getattr(layer, method)(s) if i in self.places else s
      for i, (layer, s) in enumerate(zip(self.layers, state, strict=True))
    )
