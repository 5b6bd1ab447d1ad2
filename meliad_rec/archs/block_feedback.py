"""Block feedback: all layers attend to the state vectors of a recurrent layer.

Hutchins et al. 2022, section 4.4. In addition to its window, each layer attends
to the state vectors that the recurrent layer had after the previous block. The
recurrent layer and the layers below it therefore run block by block. The layers
above it do not affect the state vectors, so they read the whole segment at
once.
"""

from collections.abc import Callable
import functools

from flax import linen as nn
import jax

from meliad_rec.archs.block_recurrent import BlockRecurrentLayer
from meliad_rec.archs.stack import named_by_layer
from meliad_rec.archs.stack import parts_of_layer
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
  """Layer that attends to its window and to the state vectors of another layer.

  State: keys and values of the last `window` tokens.

  Attributes:
    config: sizes and choices of the layer.
  """

  config: LayerConfig

  def setup(self):
    self.layer = Layer(self.config, has_memory=True)

  def __call__(self, past: KV, block: Block, memory: KV):
    """Returns the new state and the outputs [B, T, D].

    Args:
      past: the state before the block.
      block: inputs, with a mask.
      memory: keys and values of the state vectors.
    """
    n_BTD = self.layer.pre_norm(block.x)
    kv = past.append(self.layer.kv(n_BTD, block.mask))
    y_BTD = self.layer(block.x, n_BTD, kv, memory)
    return kv.last(self.config.window), y_BTD


class BlockFeedback(Cell):
  """State: for each layer, keys and values of the last `window` tokens.

  The states of recurrent layers also hold state vectors.

  Attributes:
    config: sizes and choices of the layers.
    count: number of layers.
    recurrent_at: indices of the recurrent layers, from 0 at the bottom;
      negative ones count from the top, which is -1. Layers that are not
      recurrent read the state vectors of the highest recurrent layer. Each
      recurrent layer reads its own.
    slots, gate, gate_config: see block_recurrent.StateVectors.
    layer_drop: probability that each layer is skipped in a training step; the
      layer's state is still updated.
  """

  config: LayerConfig
  count: int
  recurrent_at: tuple[int, ...]
  slots: int
  gate: Callable[..., nn.Module] = gates.FixedGate
  gate_config: str = 'skip'
  layer_drop: float = 0.0

  takes_segments = True
  scans_blocks = True
  is_recurrent = True
  can_step = True

  @property
  def block_length(self):
    return self.config.window

  def setup(self):
    if self.count < 1:
      raise ValueError(
        f'count must be at least 1, got {self.count}. Set LAYERS.'
      )
    if not self.recurrent_at:
      raise ValueError(
        'recurrent_at is empty, but block feedback needs a recurrent layer. '
        'Set RECURRENT_LAYERS to one or more indices, such as (-3,).'
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
    scanned, (*tokens, memory) = scan_blocks(
      BlockFeedback.recur, self, state[:top], blocks
    )
    x_BTD, n_BTD, new = jax.tree.map(
      lambda a: a.reshape(B, T, *a.shape[3:]), tokens
    )
    newest = jax.tree.map(lambda a: a[:, -1], memory)
    attention = self.layers[self.last].tokens.attention
    attention.sow_memory(n_BTD[:, -W:], block.mask[:, -W:], newest)
    memory = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), memory)
    finish = remat(lambda layer, *arrays: layer.tokens(*arrays), self.remat)
    past, _ = state[self.last]
    y_BTD = finish(
      self.layers[self.last], x_BTD, n_BTD, past.append(new), memory
    )
    y_BTD = drop_layer(self, self.layer_drop, x_BTD, y_BTD)
    rest, y_BTD = self.run_layers(
      range(top, self.count),
      state,
      block.replace(x=y_BTD),
      memory,
      read=remat(lambda layer, s, b, m: layer(s, b, m), self.remat),
    )
    return (*scanned, *rest), y_BTD

  def recur(self, state, block):
    """Runs one block through the layers up to the highest recurrent layer.

    For the highest recurrent layer, this method computes only the new state;
    `__call__` computes the outputs.

    Args:
      state: tuple of the states of these layers before the block.
      block: W tokens, the input of the lowest layer.

    Returns:
      The new states of these layers; and a tuple (x_BWD, n_BWD, new, memory).
      x_BWD are the inputs of the highest recurrent layer, n_BWD is their
      `pre_norm`, and `new` holds the keys and values computed from n_BWD.
      `memory` holds the keys and values of this layer's state vectors before
      the block.
    """
    fed_back, s = self.layers[self.last], state[self.last]
    n_BSD, memory = fed_back.seen(s)
    below, x_BWD = self.run_layers(range(self.last), state, block, memory)
    n_BWD = fed_back.tokens.pre_norm(x_BWD)
    new = fed_back.tokens.kv(n_BWD, block.mask)
    s = fed_back.recur(s, new, n_BSD, memory)
    return (*below, s), (x_BWD, n_BWD, new, memory)

  def run_layers(
    self,
    places,
    state,
    block,
    memory: KV,
    read: Callable = lambda layer, s, b, m: layer(s, b, m),
    recur: Callable = lambda layer, s, b: layer(s, b),
  ):
    """Runs some of the layers, each on the outputs of the one before it.

    Args:
      places: indices of the layers to run, from the bottom up.
      state: tuple of the states of all layers, indexed like the layers.
      block: input of the first layer to run.
      memory: keys and values of the state vectors of the highest recurrent
        layer. Layers that are not recurrent read them.
      read: function that runs a layer that is not recurrent: (layer, its state,
        block, memory) -> (new state, y_BTD).
      recur: function that runs a recurrent layer: (layer, its state, block) ->
        (new state, y_BTD).

    Returns:
      The new states of the layers that ran, and the outputs of the last one.
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

  def parts(self, state):
    return named_by_layer(
      (i, self.layers[i].parts(state[i])) for i in self.places
    )

  def with_parts(self, state, parts):
    of_layers = [parts_of_layer(parts, i) for i in range(self.count)]
    return self.map_recurrent('with_parts', state, of_layers)

  def memory_slots(self, state):
    return self.layers[self.last].memory_slots(state[self.last])

  def to_decode_state(self, state):
    return self.map_recurrent('to_decode_state', state)

  def decode_step(self, decode_state, block):
    return self.run_layers(
      range(self.count),
      decode_state,
      block,
      decode_state[self.last].memory,
      recur=lambda layer, s, b: layer.decode_step(s, b),
    )

  def to_segment_state(self, decode_state):
    return self.map_recurrent('to_segment_state', decode_state)

  def map_recurrent(self, method: str, state, *others):
    """Calls a method of each recurrent layer with the layer's state.

    Args:
      method: name of the method.
      state: tuple of the states of all layers.
      *others: more such tuples. The layer's states in them are further
        arguments of the method.

    Returns:
      Tuple of the states of all layers: for a recurrent layer the result of the
      method, for any other layer its state in `state`.
    """
    layers = zip(self.layers, state, *others, strict=True)
    return tuple(
      getattr(layer, method)(*states) if i in self.places else states[0]
      for i, (layer, *states) in enumerate(layers)
    )
