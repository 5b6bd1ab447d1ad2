"""A core over whole sequences: transformer, UT and GUT without recurrence.

"Investigating Recurrent Transformers with Dynamic Halt" (2024), section 3.

Core of layers with parameters of their own: the plain transformer.
"""

from collections.abc import Callable

from flax import linen as nn

from meliad_rec.layers.core_layer import CoreLayer
from meliad_rec.layers.dropout import drop_layer
from meliad_rec.layers.dropout import RowDropout
from meliad_rec.layers.dropout import TiledDropout
from meliad_rec.models.cell import Cell


class Encode(Cell):
  """State: none; no token sees beyond its own block.

  Attributes:
    core: x_BTD, mask_BT -> y_BTD; of cores/.
    window: tokens of a block; None: a block is a whole document.
    dropout: rate, of what the core reads.
    dropout_by_row: see core_config.CoreConfig.
  """

  core: nn.Module
  window: int | None = None
  dropout: float = 0.0
  dropout_by_row: bool = False

  @property
  def block_length(self):
    return self.window

  @property
  def block_setting(self):
    return 'BLOCK'

  @property
  def can_step(self):
    return False

  @property
  def causal(self):
    return self.core.causal

  @property
  def needs_whole_document(self):
    return self.window is None

  def setup(self):
    if self.window is not None and self.window < 1:
      raise ValueError(
        f'Tokens see those of their own {self.window}; set BLOCK to 1 or more, '
        'or None.'
      )
    kind = RowDropout if self.dropout_by_row else TiledDropout
    self.drop = kind(self.dropout)

  def initial_state(self, batch):
    return ()

  def __call__(self, state, block):
    return state, self.core(self.drop(block.x), block.mask)


class Layers(nn.Module):
  """`count` layers on top of one another.

  Attributes:
    layer: makes one.
    count: how many.
    layer_drop: share of training steps in which a layer is left out.
  """

  layer: Callable[[], CoreLayer]
  count: int
  layer_drop: float = 0.0

  def setup(self):
    if self.count < 1:
      raise ValueError(
        f'A transformer of {self.count} layers; set LAYERS to 1 or more.'
      )
    if self.layer().experts:
      raise ValueError(
        'Layers of their own are to have experts, which are for a layer that '
        'is run again and again; leave out options/experts, or take '
        'arch/universal.'
      )
    self.layers = [self.layer() for _ in range(self.count)]

  @property
  def causal(self) -> bool:
    """Whether no output depends on a later token."""
    return self.layer().config.causal

  def __call__(self, x_BTD, mask_BT, memory_BSD=None):
    """y_BTD; arguments: see CoreLayer."""
    for layer in self.layers:
      y_BTD = layer(x_BTD, mask_BT, memory_BSD)
      x_BTD = drop_layer(self, self.layer_drop, x_BTD, y_BTD)
    return x_BTD
