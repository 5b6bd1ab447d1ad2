"""Layers that attend to a window: sliding, Transformer-XL, and vanilla.

Hutchins et al. 2022, section 3. `WindowLayer` is the layer of a Transformer-XL
if a segment is as long as the window, and that of the paper's Sliding Window
model if a segment is longer. Tokens of a `VanillaLayer` see nothing before
their block.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from meliad_rec.layers.layer import Layer
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.models.cell import Cell


class WindowLayer(Cell):
  """State: keys and values of the last `window` tokens.

  Attributes:
    config: sizes and choices.
    position: position module that layers share. None means that the layer makes
      its own.
  """

  config: LayerConfig
  position: nn.Module | None = None

  def setup(self):
    self.layer = Layer(self.config, position=self.position)

  def initial_state(self, batch):
    return self.config.empty_past(batch)

  def source_kv(self, encoded_BSD, mask_BS):
    return self.layer.source_kv(encoded_BSD, mask_BS)

  def cast_params(self, params):
    cast = lambda path, leaf: (
      leaf.astype(self.config.dtype) if path[-1].key == 'kernel' else leaf
    )
    return jax.tree_util.tree_map_with_path(cast, params)

  def __call__(self, past, block):
    n_BTD = self.layer.pre_norm(block.x)
    # In a longer segment most keys never enter the cache; see KV.unnormalized.
    unnormalized = n_BTD.shape[1] > self.config.window
    kv = past.append(self.layer.kv(n_BTD, block.mask, unnormalized))
    y_BTD = self.layer(block.x, n_BTD, kv, source_kv=block.source_kv)
    return kv.last(self.config.window), y_BTD


class VanillaLayer(Cell):
  """State: none. A token attends only within its block of `window` tokens.

  Attributes:
    config, position: see WindowLayer.
  """

  config: LayerConfig
  position: nn.Module | None = None

  @property
  def block_length(self):
    return self.config.window

  def setup(self):
    self.layer = Layer(self.config, position=self.position)

  def initial_state(self, batch):
    return ()

  def __call__(self, state, block):
    n_BTD = self.layer.pre_norm(block.x)
    past = self.config.empty_past(block.x.shape[0])
    # Nothing comes before the block, so even the visible zeros of compat_meliad
    # are masked.
    past = past.replace(mask=jnp.zeros_like(past.mask))
    kv = past.append(self.layer.kv(n_BTD, block.mask, unnormalized=True))
    return state, self.layer(block.x, n_BTD, kv)
