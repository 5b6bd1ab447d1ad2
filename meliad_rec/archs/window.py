"""Layers that attend to a window: sliding, Transformer-XL, and vanilla.

Hutchins et al. 2022, section 3. `WindowLayer` is the layer of a Transformer-XL
if a segment is as long as the window, and that of the paper's Sliding Window
model if a segment is longer. Tokens of a `VanillaLayer` see nothing before
their block.
"""

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.layers.attention import KV
from meliad_rec.layers.layer import Layer
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell


class Inputs(struct.PyTreeNode):
  """Inputs of a layer at its last tokens, oldest first.

  Attributes:
    x: [B, S, D].
    mask: [B, S] bool, False at tokens that no query may see.
  """

  x: jax.Array
  mask: jax.Array

  def append(self, block: Block) -> 'Inputs':
    """Returns these inputs with those of a block appended."""
    return Inputs(
      jnp.concatenate([self.x, block.x], 1),
      jnp.concatenate([self.mask, block.mask], 1),
    )

  def last(self, length: int) -> 'Inputs':
    return Inputs(self.x[:, -length:], self.mask[:, -length:])


class WindowLayer(Cell):
  """State: keys and values of the last `window` tokens, or their inputs.

  Attributes:
    config: sizes and choices.
    position: position module that layers share. None means that the layer makes
      its own.
    keeps_inputs: whether the state is the layer's inputs instead, from which
      each segment computes keys and values again. They are then computed with
      the parameters of the current training step, and the parameters that
      compute them get gradients from the tokens of earlier segments too. The
      authors of the Staircase and of the Feedback Transformer do this in their
      Transformer-XL.
  """

  config: LayerConfig
  position: nn.Module | None = None
  keeps_inputs: bool = False

  def setup(self):
    self.layer = Layer(self.config, position=self.position)

  def initial_state(self, batch):
    past = self.config.empty_past(batch)
    if not self.keeps_inputs:
      return past
    shape = *past.mask.shape, self.config.d_model
    return Inputs(jnp.zeros(shape, self.config.dtype), past.mask)

  def source_kv(self, encoded_BSD, mask_BS):
    return self.layer.source_kv(encoded_BSD, mask_BS)

  def cast_params(self, params):
    cast = lambda path, leaf: (
      leaf.astype(self.config.dtype) if path[-1].key == 'kernel' else leaf
    )
    return jax.tree_util.tree_map_with_path(cast, params)

  def __call__(self, state, block):
    W = self.config.window
    if not self.keeps_inputs:
      return self.read(state, block)
    seen = state.append(block)
    n_BSD = self.layer.pre_norm(seen.x)
    kv = self.layer.kv(n_BSD, seen.mask)
    y_BTD = self.layer(block.x, n_BSD[:, W:], kv, source_kv=block.source_kv)
    return seen.last(W), y_BTD

  def read(self, past: KV, block):
    """Returns the keys and values of the last tokens, and the outputs."""
    n_BTD = self.layer.pre_norm(block.x)
    # In a longer segment most keys never enter the cache; see KV.unnormalized.
    unnormalized = n_BTD.shape[1] > self.config.window
    kv = past.append(self.layer.kv(n_BTD, block.mask, unnormalized))
    y_BTD = self.layer(block.x, n_BTD, kv, source_kv=block.source_kv)
    return kv.last(self.config.window), y_BTD

  # While a text is generated, the keys and values are kept too.

  def to_decode_state(self, state):
    if not self.keeps_inputs:
      return state
    n_BSD = self.layer.pre_norm(state.x)
    return state, self.layer.kv(n_BSD, state.mask)

  def decode_step(self, decode_state, block):
    if not self.keeps_inputs:
      return self(decode_state, block)
    inputs, past = decode_state
    past, y_B1D = self.read(past, block)
    return (inputs.append(block).last(self.config.window), past), y_B1D

  def to_segment_state(self, decode_state):
    return decode_state[0] if self.keeps_inputs else decode_state


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
