"""Sizes and choices that all layers of a model share."""

from collections.abc import Callable
import dataclasses

from flax import linen as nn

from meliad_rec.layers import activations
from meliad_rec.layers import norms
from meliad_rec.layers import positions
from meliad_rec.layers.attention import KV
from meliad_rec.layers.dropout import LockedDropout
from meliad_rec.layers.dropout import TiledDropout


@dataclasses.dataclass(frozen=True)
class LayerConfig:
  """Sizes and choices that the layers of one model have in common.

  Attributes:
    d_model: width of the residual stream.
    num_heads: attention heads.
    head_dim: width of a head; num_heads * head_dim need not be d_model.
    mlp_dim: hidden units.
    window: tokens that attention sees, and tokens in a block.
    position: a class of positions.py.
    span: a class of span.py; None: heads see the whole window.
    num_kv_heads: heads of keys and values, each shared by equally many query
      heads (Ainslie et al. 2023); None: one per query head.
    normalize_qk: queries and keys of unit length, and a learned scale a head.
    include_self: whether a token is the last of its own window.
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
  num_heads: int
  head_dim: int
  mlp_dim: int
  window: int
  position: Callable[..., nn.Module] = positions.T5Bias
  span: Callable[..., nn.Module] | None = None
  num_kv_heads: int | None = None
  normalize_qk: bool = True
  include_self: bool = False
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
    for name in ('d_model', 'num_heads', 'head_dim', 'mlp_dim', 'window'):
      if getattr(self, name) < 1:
        raise ValueError(
          f'{name} is {getattr(self, name)}; it needs 1 or more. Set '
          f'{name.upper()}.'
        )
    if self.num_kv_heads is not None and (
      self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads
    ):
      raise ValueError(
        f'num_kv_heads must divide num_heads, got {self.num_kv_heads} and '
        f'{self.num_heads}. Set layer_config.LayerConfig.num_kv_heads.'
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
  def kv_heads(self) -> int:
    """Of keys and values."""
    return self.num_kv_heads or self.num_heads

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
      self.kv_heads,
      self.head_dim,
      self.dtype,
      visible=self.compat_meliad,
    )
