"""Recurrent Memory Transformer (Bulatov et al. 2022, section 3.2).

A plain causal transformer reads the sequence [memory ; tokens of a block ;
memory]. Tokens attend to the first copy of the memory and to earlier tokens.
The second copy attends to the first and to all tokens, and its outputs become
the memory of the next block. Bulatov et al. pass these outputs on unchanged.
By default they are normalized here: the layers add to the memory in every
block, so the memory's norm would otherwise grow throughout a long document.
"""

import dataclasses

from flax import linen as nn
import jax.numpy as jnp

from meliad_rec.archs.window import VanillaLayer
from meliad_rec.layers.dropout import drop_layer
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.metrics import pictures
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell


class RecurrentMemory(Cell):
  """State: S memory slots, [B, S, D] float32; the initial ones are learned.

  Attributes:
    config: sizes and choices of the layers; a block is `window` tokens.
    count: number of layers.
    slots: number of memory slots S (memory tokens in the paper).
    layer_drop: probability that each layer is skipped in a training step.
    normalize: whether the memory is normalized after each block.
  """

  config: LayerConfig
  count: int
  slots: int
  layer_drop: float = 0.0
  normalize: bool = True

  is_recurrent = True

  @property
  def block_length(self):
    return self.config.window

  def setup(self):
    if self.slots < 1 or self.count < 1:
      raise ValueError(
        f'slots and count must be at least 1, got slots={self.slots}, '
        f'count={self.count}. Set SLOTS and LAYERS.'
      )
    length = self.config.window + 2 * self.slots
    config = dataclasses.replace(self.config, window=length)
    self.layers = [VanillaLayer(config) for _ in range(self.count)]
    if self.normalize:
      self.norm = config.norm(dtype='float32')
    shape = self.slots, self.config.d_model
    init = nn.initializers.normal(1.0)
    self.initial_memory_SD = self.param('first', init, shape)

  def initial_state(self, batch):
    shape = batch, *self.initial_memory_SD.shape
    return jnp.broadcast_to(self.initial_memory_SD, shape)

  def parts(self, state):
    return {'slots': state}

  def with_parts(self, state, parts):
    return parts['slots']

  def memory_slots(self, state):
    return state

  def __call__(self, state, block):
    S, memory_BSD = self.slots, state.astype(block.x.dtype)
    x_BTD = jnp.concatenate([memory_BSD, block.x, memory_BSD], 1)
    # Memory is never padding.
    mask_BT = jnp.pad(block.mask, ((0, 0), (S, S)), constant_values=True)
    for layer in self.layers:
      _, y_BTD = layer((), Block(x_BTD, mask_BT))
      self.split_picture(layer.layer.attention)
      x_BTD = drop_layer(self, self.layer_drop, x_BTD, y_BTD)
    # A block of padding leaves the memory unchanged.
    real_B11 = jnp.any(block.mask, 1)[:, None, None]
    memory_BSD = x_BTD[:, -S:]
    if self.normalize:
      memory_BSD = self.norm(memory_BSD)
    return jnp.where(real_B11, memory_BSD, state), x_BTD[:, S:-S]

  def split_picture(self, attention: nn.Module) -> None:
    """Splits the picture of a layer's attention by slots and tokens.

    Slots are attended to in the first copy of the memory, and attend to others
    in the second copy.
    """
    if not pictures.wanted(self):
      return
    S, W = self.slots, self.config.window
    collection = pictures.COLLECTION
    (p_BTHR,) = attention.get_variable(collection, 'token_to_token')
    nearest = 0 if self.config.include_self else 1
    at_T = jnp.arange(p_BTHR.shape[1]) - nearest
    key_TR = at_T[:, None] - jnp.arange(p_BTHR.shape[3])
    near = jnp.where((key_TR >= S)[:, None], p_BTHR, 0)[:, S : S + W, :, :W]
    attention.put_variable(collection, 'token_to_token', (near,))
    # From distances to keys; the distance of key i is at_T - i.
    back_TK = at_T[:, None] - jnp.arange(S + W)
    back = jnp.maximum(back_TK, 0)[None, :, None]
    p_BTHK = jnp.take_along_axis(p_BTHR, back, 3)
    p_BTHK = jnp.where((back_TK >= 0)[:, None], p_BTHK, 0)
    tokens, slots = p_BTHK[:, S : S + W], p_BTHK[:, S + W :]
    pictures.sow(attention, 'token_to_state', lambda: tokens[..., :S])
    pictures.sow(attention, 'state_to_state', lambda: slots[..., :S])
    pictures.sow(attention, 'state_to_token', lambda: slots[..., S:])
