"""Recurrent Memory Transformer (Bulatov et al. 2022, section 3.2).

A plain causal transformer over [memory ; block of tokens ; memory]: tokens read
the memory in front of them, the memory behind them sees all, and what becomes
of it is the memory of the next block. Bulatov et al. hand it on as it is; here
it is normalised first: layers add to it in every block, and nothing in a
pre-norm transformer would take off what a long document adds up to.
"""

import dataclasses

from flax import linen as nn
import jax.numpy as jnp

from meliad_rec.archs.window import VanillaLayer
from meliad_rec.layers.dropout import drop_layer
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell


class RecurrentMemory(Cell):
  """State: S memory vectors, [B, S, D] float32; learned first ones.

  Attributes:
    config: sizes; a block is `window` tokens.
    count: layers.
    slots: memory vectors S.
    layer_drop: share of training steps without a layer, for each.
  """

  config: LayerConfig
  count: int
  slots: int
  layer_drop: float = 0.0

  @property
  def block_length(self):
    return self.config.window

  @property
  def is_recurrent(self):
    return True

  def setup(self):
    if self.slots < 1 or self.count < 1:
      raise ValueError(
        f'There are {self.slots} memory slots and {self.count} layers; set '
        'SLOTS and LAYERS to 1 or more.'
      )
    length = self.config.window + 2 * self.slots
    config = dataclasses.replace(self.config, window=length)
    self.layers = [VanillaLayer(config) for _ in range(self.count)]
    self.norm = config.norm(dtype='float32')
    shape = self.slots, self.config.d_model
    self.first_SD = self.param('first', nn.initializers.normal(1.0), shape)

  def initial_state(self, batch):
    return jnp.broadcast_to(self.first_SD, (batch, *self.first_SD.shape))

  def clear(self, state):
    return self.initial_state(len(state))

  def memory_slots(self, state):
    return state

  def __call__(self, state, block):
    S, memory_BSD = self.slots, state.astype(block.x.dtype)
    x_BTD = jnp.concatenate([memory_BSD, block.x, memory_BSD], 1)
    # Memory is never padding.
    mask_BT = jnp.pad(block.mask, ((0, 0), (S, S)), constant_values=True)
    for layer in self.layers:
      _, y_BTD = layer((), Block(x_BTD, mask_BT))
      x_BTD = drop_layer(self, self.layer_drop, x_BTD, y_BTD)
    # Padding behind a document leaves its memory as it is.
    real_B11 = jnp.any(block.mask, 1)[:, None, None]
    return jnp.where(real_B11, self.norm(x_BTD[:, -S:]), state), x_BTD[:, S:-S]
