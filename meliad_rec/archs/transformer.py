"""The plain transformer, and the cell that wraps any encoder.

Ray Chowdhury and Caragea 2024, section 3. The cell `Encoder` passes its tokens
to a module: `EncoderLayers`, which is the plain transformer, or
`universal.Universal`, which is the Universal Transformer (UT) or its gated form
(GUT).
"""

from collections.abc import Callable

from flax import linen as nn

from meliad_rec.layers.dropout import check_rate
from meliad_rec.layers.dropout import drop_layer
from meliad_rec.layers.dropout import RowDropout
from meliad_rec.layers.dropout import TiledDropout
from meliad_rec.layers.encoder_layer import EncoderLayer
from meliad_rec.layers.positions import sinusoids
from meliad_rec.models.cell import Cell


class Encoder(Cell):
  """State: none. A token attends only within its own block.

  Attributes:
    encoder: module (x_BTD, mask_BT) -> y_BTD: EncoderLayers or
      universal.Universal.
    window: number of tokens of a block. None means that a block is a whole
      document.
    dropout: rate of dropout on the encoder's input.
    dropout_by_row: whether each row has its own dropout mask; see
      layer_config.EncoderConfig.
  """

  encoder: nn.Module
  window: int | None = None
  dropout: float = 0.0
  dropout_by_row: bool = False

  block_setting = 'BLOCK'
  can_step = False

  @property
  def block_length(self):
    return self.window

  @property
  def causal(self):
    return self.encoder.causal

  @property
  def needs_whole_document(self):
    return self.window is None

  @property
  def shares_dropout(self):
    return not self.dropout_by_row

  def setup(self):
    if self.window is not None and self.window < 1:
      raise ValueError(
        f'window must be None or at least 1, got {self.window}. Set BLOCK.'
      )
    check_rate('dropout', self.dropout, 'DROPOUT')
    kind = RowDropout if self.dropout_by_row else TiledDropout
    self.drop = kind(self.dropout)

  def initial_state(self, batch):
    return ()

  def __call__(self, state, block):
    return state, self.encoder(self.drop(block.x), block.mask)


class EncoderLayers(nn.Module):
  """A stack of layers, each with its own parameters.

  Attributes:
    layer: function or class that makes a layer.
    count: number of layers.
    layer_drop: probability that each layer is skipped in a training step.
    sinusoids: whether vectors of absolute positions are added to the input; see
      positions.sinusoids. Position 0 is the first token of a call.
  """

  layer: Callable[[], EncoderLayer]
  count: int
  layer_drop: float = 0.0
  sinusoids: bool = False

  def setup(self):
    if self.count < 1:
      raise ValueError(
        f'count must be at least 1, got {self.count}. Set LAYERS.'
      )
    if self.layer().experts:
      raise ValueError(
        'A transformer whose layers have their own parameters cannot have '
        'experts. Remove options/layer/experts, or use arch/universal.'
      )
    self.layers = [self.layer() for _ in range(self.count)]

  @property
  def causal(self) -> bool:
    """Whether no output depends on a later token."""
    return self.layer().config.causal

  def __call__(self, x_BTD, mask_BT, memory_BSD=None):
    """Returns y_BTD; the arguments are as in EncoderLayer.__call__."""
    if self.sinusoids:
      x_BTD = x_BTD + sinusoids(*x_BTD.shape[1:]).astype(x_BTD.dtype)
    for layer in self.layers:
      y_BTD = layer(x_BTD, mask_BT, memory_BSD)
      x_BTD = drop_layer(self, self.layer_drop, x_BTD, y_BTD)
    return x_BTD
