"""Core of layers with parameters of their own: the plain transformer."""

from collections.abc import Callable

from flax import linen as nn

from meliad_rec.cores.core_layer import CoreLayer
from meliad_rec.dropout import drop_layer


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
