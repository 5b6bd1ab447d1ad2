"""Sizes and choices that the layers of a core share."""

from collections.abc import Callable
import dataclasses

from flax import linen as nn

from meliad_rec.layers import activations
from meliad_rec.layers import norms
from meliad_rec.layers import positions
from meliad_rec.layers.dropout import RowDropout
from meliad_rec.layers.dropout import TiledDropout

# Those that turn and scale queries and keys; cores add no bias to logits.
POSITIONS = (
  positions.NoPosition,
  positions.RoPE,
  positions.XPos,
  positions.SymmetricXPos,
)


@dataclasses.dataclass(frozen=True)
class CoreConfig:
  """What the layers of a core have in common.

  Attributes:
    d_model: width of the residual stream.
    num_heads: attention heads.
    head_dim: width of a head; num_heads * head_dim need not be d_model.
    mlp_dim: hidden units, of the MLP and of the gate.
    causal: whether a token sees none behind it.
    position: one of POSITIONS; self-attention alone has positions.
    norm: a class of norms.py.
    activation: a function of activations.py, for the MLP and the gate.
    dropout: rate, of embeddings, hidden units and what sublayers add.
    attention_dropout: rate, of attention probabilities.
    dropout_by_row: whether each row of a batch, a sequence of a pair too, drops
      numbers of its own, as in the authors' code; else all rows drop the same,
      which takes less time and memory. Chunks of a row share what they drop
      either way (cell.scan_blocks).
    dtype: of activations; parameters, softmax, norms, gates and halting are
      float32.
  """

  d_model: int
  num_heads: int
  head_dim: int
  mlp_dim: int
  causal: bool
  position: Callable[..., nn.Module] = positions.XPos
  norm: Callable[..., nn.Module] = norms.LayerNorm
  activation: Callable = activations.gelu
  dropout: float = 0.0
  attention_dropout: float = 0.0
  dropout_by_row: bool = False
  dtype: str = 'float32'

  @property
  def dropout_kind(self) -> Callable[..., nn.Module]:
    """A class of dropout.py."""
    return RowDropout if self.dropout_by_row else TiledDropout

  def __post_init__(self):
    for name in ('d_model', 'num_heads', 'head_dim', 'mlp_dim'):
      if getattr(self, name) < 1:
        raise ValueError(
          f'{name} is {getattr(self, name)}; it needs 1 or more. Set '
          f'{name.upper()}.'
        )
    for name in ('dropout', 'attention_dropout'):
      if not 0 <= getattr(self, name) < 1:
        raise ValueError(
          f'{name} is {getattr(self, name)}; it needs 0 or more and less than '
          f'1. Set {name.upper()}.'
        )
    if self.dtype not in ('float32', 'bfloat16'):
      raise ValueError(
        f'dtype is {self.dtype!r}; it needs float32 or bfloat16. Set DTYPE.'
      )
    # A class, or what stands for one: what it makes is asked.
    made, bare = type(self.position(self.num_heads)), positions.NoPosition
    if made.bias is not bare.bias or made.keys is not bare.keys:
      names = ', '.join(position.__name__ for position in POSITIONS)
      raise ValueError(
        f'The position is {self.position}; layers of a core take one of '
        f'{names}. Set core_config.CoreConfig.position.'
      )
