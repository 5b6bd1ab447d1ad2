"""Sizes and choices that all layers of a model share."""

from collections.abc import Callable
import dataclasses

from flax import linen as nn

from meliad_rec import activations
from meliad_rec import norms
from meliad_rec import positions
from meliad_rec.attention import KV
from meliad_rec.dropout import LockedDropout
from meliad_rec.dropout import TiledDropout


@dataclasses.dataclass(frozen=True)
class LayerConfig:
  """Sizes and choices that the layers of one model have in common.

  Attributes:
    d_model: width of the residual stream.
    heads: attention heads.
    head_width: width of a head; heads * head_width need not be d_model.
    mlp_width: hidden units.
    window: tokens that attention sees, and tokens in a block.
    position: a class of positions.py.
    span: a class of span.py; None: heads see the whole window.
    key_heads: heads of keys and values, each of which serves as many heads of
      queries as the others (Ainslie et al. 2023); None: one for each.
    normalize_qk: queries and keys of unit length, and a learned scale a head.
    sees_self: whether a token is the last of its own window.
    attention_kernels: whether attention may run in kernels (see
      kernels/choice.py), or in XLA's form alone.
    norm: a class of norms.py, for all norms of a layer.
    activation: a function of activations.py, for the MLP.
    mlp_bias: whether the MLP has biases. A gate behind it has its own choice.
    depth: layers L of the stack; what layers add to the stream then begins with
      weights divided by sqrt(2 L). None: they are not. Gates are as they are.
    dropout: rate; after the first norm, of attention probabilities, and of the
      MLP's output. State vectors have none, as in the authors' code.
    locked_dropout: whether a row drops the same at all its tokens, for cells
      that read token by token; attention probabilities are then not dropped.
    dtype: of activations; parameters, softmax, norms and gates are float32.
    compat_meliad: the numerics of google-research/meliad: an empty cache is
      zeros that take part in the softmax, the scale multiplies the position
      bias too, and gates have a tanh in configuration 'single' alone.
  """

  d_model: int
  heads: int
  head_width: int
  mlp_width: int
  window: int
  position: Callable[..., nn.Module] = positions.T5Bias
  span: Callable[..., nn.Module] | None = None
  key_heads: int | None = None
  normalize_qk: bool = True
  sees_self: bool = False
  attention_kernels: bool = True
  norm: Callable[..., nn.Module] = norms.RMSNorm
  activation: Callable = activations.relu
  mlp_bias: bool = False
  depth: int | None = None
  dropout: float = 0.0
  locked_dropout: bool = False
  dtype: str = 'float32'
  compat_meliad: bool = False

  def __post_init__(self):
    for name in ('d_model', 'heads', 'head_width', 'mlp_width', 'window'):
      if getattr(self, name) < 1:
        raise ValueError(
          f'{name} is {getattr(self, name)}; it needs 1 or more. Set '
          f'{name.upper()}.'
        )
    if self.key_heads is not None and (
      self.key_heads < 1 or self.heads % self.key_heads
    ):
      raise ValueError(
        f'{self.heads} heads cannot share {self.key_heads} heads of keys '
        'evenly; set layer_config.LayerConfig.key_heads to a divisor of HEADS.'
      )
    if self.depth is not None and self.depth < 1:
      raise ValueError(
        f'depth is {self.depth}; it needs the number of layers, or None. Set '
        'layer_config.LayerConfig.depth.'
      )
    if not 0 <= self.dropout < 1:
      raise ValueError(
        f'dropout is {self.dropout}; it needs 0 or more and less than 1. Set '
        'DROPOUT.'
      )
    if self.dtype not in ('float32', 'bfloat16'):
      raise ValueError(
        f'dtype is {self.dtype!r}; it needs float32 or bfloat16. Set DTYPE.'
      )

  @property
  def kept_heads(self) -> int:
    """Of keys and values."""
    return self.key_heads or self.heads

  @property
  def attention_form(self) -> str | None:
    """As functions of kernels/ take it."""
    return None if self.attention_kernels else 'xla'

  @property
  def output_scale(self) -> float:
    """Of the first weights of what a layer adds to the stream."""
    return 1.0 if self.depth is None else (2 * self.depth) ** -0.5

  @property
  def dropout_kind(self) -> Callable[..., nn.Module]:
    """A class of dropout.py."""
    return LockedDropout if self.locked_dropout else TiledDropout

  def empty_past(self, batch: int) -> KV:
    """The window cache at the start of a document."""
    return KV.empty(
      batch,
      self.window,
      self.kept_heads,
      self.head_width,
      self.dtype,
      visible=self.compat_meliad,
    )
