"""Block feedback: every layer also reads the recurrent states.

Hutchins et al. 2022, section 3.6: each layer attends to the states that the
recurrent layer left one block before. So the layers up to that one run block by
block; those above, whose outputs do not feed back, take the segment at once.
"""

from collections.abc import Callable
import functools

from flax import linen as nn
import jax

from meliad_rec.archs.block_recurrent import BlockRecurrentLayer
from meliad_rec.archs.stack import special_places
from meliad_rec.layers import gates
from meliad_rec.layers.attention import KV
from meliad_rec.layers.dropout import drop_layer
from meliad_rec.layers.layer import Layer
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.layers.remat import remat
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import scan_blocks
from meliad_rec.models.cell import to_blocks


class ReadingLayer(nn.Module):
  """A window layer that also reads memory; its state is a window cache."""

  config: LayerConfig

  def setup(self):
    self.layer = Layer(self.config, has_memory=True)

  def __call__(self, past: KV, block: Block, memory: KV):
    n_BTD = self.layer.pre_norm(block.x)
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
    layer_drop: share of training steps without a layer; states still move.
  """

  config: LayerConfig
  count: int
  recurrent_at: tuple[int, ...]
  slots: int
  gate: Callable[..., nn.Module] = gates.FixedGate
  gate_config: str = 'skip'
  layer_drop: float = 0.0

  @property
  def block_length(self):
    return self.config.window

  @property
  def takes_segments(self):
    return True

  @property
  def scans_blocks(self):
    return True

  @property
  def is_recurrent(self):
    return True

  @property
  def can_step(self):
    return True

  def setup(self):
    if not self.recurrent_at:
      raise ValueError(
        'Block feedback needs a recurrent layer; set RECURRENT_LAYERS.'
      )
    self.places = special_places(self.count, self.recurrent_at)
    self.last = self.places[-1]
    recurrent = functools.partial(
      BlockRecurrentLayer, self.config, self.slots, self.gate, self.gate_config
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
    W, (B, T), top = self.config.window, block.mask.shape, self.last + 1
    blocks = jax.tree.map(lambda a: to_blocks(a, W), block)
    scanned, (x, heads, memory) = scan_blocks(
      BlockFeedback.recur, self, state[:top], blocks
    )
    x_BTD, *heads = [a.reshape(B, T, -1) for a in (x, *heads)]
    memory = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), memory)
    finish = remat(lambda layer, b, h: layer.output(b, h), self.remat)
    y_BTD = finish(self.layers[self.last], block.replace(x=x_BTD), heads)
    y_BTD = drop_layer(self, self.layer_drop, x_BTD, y_BTD)
    rest, y_BTD = self.through(
      range(top, self.count),
      state,
      block.replace(x=y_BTD),
      memory,
      read=remat(lambda layer, s, b, m: layer(s, b, m), self.remat),
    )
    return (*scanned, *rest), y_BTD

  def recur(self, state, block):
    """A block, as far as its states depend on it.

    Returns:
      The states of the layers up to the one that feeds back, and of that layer
      its inputs, the heads of its tokens, and what all read.
    """
    fed_back, s = self.layers[self.last], state[self.last]
    n_BSD, memory = fed_back.seen(s)
    new, x_BWD = self.through(range(self.last), state, block, memory)
    s, heads = fed_back.recur(s, block.replace(x=x_BWD), n_BSD, memory)
    return (*new, s), (x_BWD, heads, memory)

  def through(
    self,
    places,
    state,
    block,
    memory: KV,
    read: Callable = lambda layer, s, b, m: layer(s, b, m),
    recur: Callable = lambda layer, s, b: layer(s, b),
  ):
    """Feeds each layer what the one below gave, and the states to all.

    Args:
      places: of the layers.
      state: of all layers, by place.
      block: input of the first of them.
      memory: what tokens see of the states.
      read: calls a plain layer.
      recur: calls a recurrent layer.

    Returns:
      The new states of these layers, and the outputs of the last.
    """
    new = []
    for i in places:
      layer, s = self.layers[i], state[i]
      if i in self.places:
        s, y_BTD = recur(layer, s, block)
      else:
        s, y_BTD = read(layer, s, block, memory)
      y_BTD = drop_layer(layer, self.layer_drop, block.x, y_BTD)
      block = block.replace(x=y_BTD)
      new.append(s)
    return tuple(new), block.x

  def clear(self, state):
    return self.each('clear', state)

  def memory_slots(self, state):
    return self.layers[self.last].memory_slots(state[self.last])

  def to_decode_state(self, state):
    return self.each('to_decode_state', state)

  def decode_step(self, opened, block):
    return self.through(
      range(self.count),
      opened,
      block,
      opened[self.last].memory,
      recur=lambda layer, s, b: layer.decode_step(s, b),
    )

  def to_segment_state(self, opened):
    return self.each('to_segment_state', opened)

  def each(self, method: str, state):
    """A method of the recurrent layers, on their states."""
    return tuple(
      getattr(layer, method)(s) if i in self.places else s
      for i, (layer, s) in enumerate(zip(self.layers, state, strict=True))
    )
