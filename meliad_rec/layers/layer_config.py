"""Sizes and choices that the layers of one model share.

`LayerConfig` is for layers whose tokens attend to a window (layer.py), and
`EncoderConfig` for layers whose tokens attend to all tokens they are given
(encoder_layer.py).
"""

from collections.abc import Callable
import dataclasses

from flax import linen as nn
import jax

from meliad_rec.kernels.dispatch import IMPLEMENTATIONS
from meliad_rec.layers import norms
from meliad_rec.layers import positions
from meliad_rec.layers.attention import KV
from meliad_rec.layers.dropout import check_rate
from meliad_rec.layers.dropout import LockedDropout
from meliad_rec.layers.dropout import RowDropout
from meliad_rec.layers.dropout import TiledDropout


def gelu(h):
  """Returns h times the normal CDF at h (Hendrycks and Gimpel 2016).

  By default, jax.nn.gelu only approximates it.
  """
  return jax.nn.gelu(h, approximate=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """Base class of LayerConfig and EncoderConfig.

  Attributes:
    d_model: width of the residual stream.
    num_heads: number of attention heads.
    head_dim: width of a head; num_heads * head_dim need not equal d_model.
    mlp_dim: number of hidden units of the MLP.
    position: a class from positions.py.
    norm: a class from norms.py, for all norms of a layer.
    activation: function of the hidden units, such as jax.nn.relu.
    post_norm: whether norms are applied to the sum of the residual stream and
      the result of a sublayer (Vaswani et al. 2017), instead of before the
      sublayer.
    dropout: rate of dropout; the subclasses say where it applies.
    dtype: dtype of activations, 'float32' or 'bfloat16'. Parameters are
      float32, and softmax, norms, gates and halting are computed in float32.
  """

  d_model: int
  num_heads: int
  head_dim: int
  mlp_dim: int
  position: Callable[..., nn.Module]
  norm: Callable[..., nn.Module]
  activation: Callable
  post_norm: bool = False
  dropout: float = 0.0
  dtype: str = 'float32'

  def __post_init__(self):
    self.check_positive('d_model', 'num_heads', 'head_dim', 'mlp_dim')
    self.check_rate('dropout')
    if self.dtype not in ('float32', 'bfloat16'):
      raise ValueError(
        f'dtype must be float32 or bfloat16, got {self.dtype!r}. Set DTYPE.'
      )

  def check_positive(self, *names: str) -> None:
    """Raises ValueError if one of the named fields is below 1."""
    for name in names:
      if getattr(self, name) < 1:
        raise ValueError(
          f'{name} must be at least 1, got {getattr(self, name)}. Set '
          f'{name.upper()}.'
        )

  def check_rate(self, name: str, of: str = '') -> None:
    """Raises ValueError if a rate is outside [0, 1).

    Args:
      name: name of the field.
      of: class whose parameter sets it; '' means that a macro of its name does.
    """
    setting = f'layer_config.{of}.{name}' if of else name.upper()
    check_rate(name, getattr(self, name), setting)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig(TransformerConfig):
  """Sizes and choices of layers that attend to a window.

  Attributes:
    window: number of tokens to which a token attends; in most cells that read
      blocks, also the length of a block (see Cell.block_length).
    span: positions.AdaptiveSpan. None means that heads see the whole window.
    num_kv_heads: number of heads of keys and values, each shared by equally
      many query heads (Ainslie et al. 2023). None means one per query head.
    normalize_qk: whether queries and keys have unit length (Henry et al. 2020).
      If True, each head learns a scale, by which it multiplies its logits.
    qk_scale: initial value of the scale that normalize_qk adds. Logits of unit
      vectors are at most as large as the scale. With 1, the published value,
      attention is therefore nearly uniform at first.
    memory_qk_scale: initial value of that scale where attention reads state
      vectors or other memory, whose keys have no positions. None: qk_scale.
    include_self: whether the window of a token ends with the token itself. If
      False, it ends with the token before.
    attention: 'auto' uses kernels on a TPU and a CUDA GPU, and XLA elsewhere;
      'gpu' does too, but raises an error on a GPU that cannot run the kernels;
      'xla' uses XLA only (see kernels/dispatch.py).
    mlp_bias: whether the MLP has biases. Gates have a separate `use_bias`.
    depth: number of layers L in the stack; the initial weights of output maps
      are divided by sqrt(2 L), except in gates. None means that they are not
      divided.
    cross: whether tokens also attend to the output of an encoder, between
      attention to the window and the MLP.
    post_norm: as above, but state vectors always have the norm before: gates
      take the place of their sums.
    dropout: rate of dropout on the input of attention (after its norm, unless
      post_norm) and on the result of the MLP. State vectors have no dropout, as
      in google-research/meliad.
    attention_dropout: rate of dropout on attention probabilities. None means
      `dropout` or, if locked_dropout is True, 0. Attention to state vectors has
      none, as in google-research/meliad.
    hidden_dropout: rate of dropout on the hidden units of the MLP, after the
      activation.
    locked_dropout: whether all tokens of a row share one mask of `dropout`, for
      cells that read token by token. Such cells give layers the positions of
      tokens (see Layer.__call__), on which the other masks depend.
    compat_meliad: whether to follow the numerics of google-research/meliad. An
      empty cache then holds zeros that take part in the softmax, the scale of
      logits multiplies the position bias too, and gates have a tanh only if
      block_recurrent.StateVectors.gate_config is 'single'.
  """

  window: int
  position: Callable[..., nn.Module] = positions.T5Bias
  span: Callable[..., nn.Module] | None = None
  num_kv_heads: int | None = None
  normalize_qk: bool = True
  qk_scale: float = 1.0
  memory_qk_scale: float | None = None
  include_self: bool = False
  attention: str = 'auto'
  norm: Callable[..., nn.Module] = norms.RMSNorm
  activation: Callable = jax.nn.relu
  mlp_bias: bool = False
  depth: int | None = None
  cross: bool = False
  attention_dropout: float | None = None
  hidden_dropout: float = 0.0
  locked_dropout: bool = False
  compat_meliad: bool = False

  def __post_init__(self):
    super().__post_init__()
    self.check_positive('window')
    if self.attention_dropout is not None:
      self.check_rate('attention_dropout', 'LayerConfig')
    self.check_rate('hidden_dropout', 'LayerConfig')
    if self.num_kv_heads is not None and (
      self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads
    ):
      raise ValueError(
        f'num_kv_heads must divide num_heads, got {self.num_kv_heads} for '
        f'{self.num_heads} heads. Set layer_config.LayerConfig.num_kv_heads.'
      )
    # Either may be a partial: look at what it builds.
    for name, kind in (
      ('position', positions.Position),
      ('span', positions.AdaptiveSpan),
    ):
      make = getattr(self, name)
      if make is None and name == 'span':
        continue
      built = make(self.num_heads)
      if not isinstance(built, kind):
        raise ValueError(
          f'{name} must be a {kind.__name__} of positions.py, got '
          f'{type(built).__name__}. Set layer_config.LayerConfig.{name}.'
        )
    for name, without in ('qk_scale', 1.0), ('memory_qk_scale', None):
      value, setting = getattr(self, name), f'layer_config.LayerConfig.{name}'
      if value is not None and value <= 0:
        raise ValueError(f'{name} must be above 0, got {value}. Set {setting}.')
      if value != without and not self.normalize_qk:
        raise ValueError(
          f'{name} is {value}, but only normalized queries and keys have a '
          f'scale. Remove {setting}, or set '
          'layer_config.LayerConfig.normalize_qk = True.'
        )
    if self.attention not in IMPLEMENTATIONS:
      raise ValueError(
        f'attention must be one of {", ".join(IMPLEMENTATIONS)}, got '
        f'{self.attention!r}. Set layer_config.LayerConfig.attention.'
      )
    if self.depth is not None and self.depth < 1:
      raise ValueError(
        f'depth must be the number of layers or None, got {self.depth}. Set '
        'layer_config.LayerConfig.depth.'
      )

  @property
  def kv_heads(self) -> int:
    """Number of heads of keys and values."""
    return self.num_kv_heads or self.num_heads

  @property
  def output_scale(self) -> float:
    """Scale of the initial weights of output maps; see `depth`."""
    return 1.0 if self.depth is None else (2 * self.depth) ** -0.5

  @property
  def attention_rate(self) -> float:
    """Rate of dropout on attention probabilities; see `attention_dropout`."""
    if self.attention_dropout is not None:
      return self.attention_dropout
    return 0.0 if self.locked_dropout else self.dropout

  @property
  def dropout_kind(self) -> Callable[..., nn.Module]:
    """Class in dropout.py that is used for activations."""
    return LockedDropout if self.locked_dropout else TiledDropout

  def empty_past(self, batch: int) -> KV:
    """Returns the keys and values of the window at the start of a document."""
    return KV.empty(
      batch,
      self.window,
      self.kv_heads,
      self.head_dim,
      self.dtype,
      visible=self.compat_meliad,
    )


# Positions that only rotate and scale queries and keys. Attention of encoders
# adds no bias to logits and no vectors to keys.
ENCODER_POSITIONS = (
  positions.NoPosition,
  positions.RoPE,
  positions.XPos,
  positions.SymmetricXPos,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(TransformerConfig):
  """Sizes and choices of layers that attend to all tokens they are given.

  Attributes:
    causal: whether tokens attend only to themselves and to earlier tokens.
    mlp_dim: number of hidden units of the MLP, and of the MLP that computes the
      gate.
    position: a class, for self-attention, that only rotates and scales queries
      and keys, such as those in ENCODER_POSITIONS.
    activation: function of the hidden units of both MLPs.
    dropout: rate of dropout on the results of attention and of both MLPs, and
      in a LatentBottleneck also on its input. For the input of other cells, see
      transformer.Encoder.dropout and model.Model.embedding_dropout.
    hidden_dropout: rate of dropout on the hidden units of an MLP. None:
      `dropout`.
    attention_dropout: rate of dropout on attention probabilities.
    dropout_by_row: whether each row of a batch (and each sequence of a pair),
      and in it each chunk, has its own dropout masks, as in the code of Ray
      Chowdhury and Caragea 2024. If False, dropout drops the same units in all
      rows and chunks, and again after every 128 tokens, which takes less time
      and memory.
  """

  causal: bool
  position: Callable[..., nn.Module] = positions.XPos
  norm: Callable[..., nn.Module] = norms.LayerNorm
  activation: Callable = gelu
  attention_dropout: float = 0.0
  hidden_dropout: float | None = None
  dropout_by_row: bool = False

  def __post_init__(self):
    super().__post_init__()
    self.check_rate('attention_dropout')
    if self.hidden_dropout is not None:
      self.check_rate('hidden_dropout')
    # `position` may be a partial: look at what it builds.
    built = self.position(self.num_heads)
    plain = positions.Position
    if (
      not isinstance(built, plain)
      or type(built).bias is not plain.bias
      or type(built).keys is not plain.keys
    ):
      names = ', '.join(p.__name__ for p in ENCODER_POSITIONS)
      raise ValueError(
        f'position must only rotate queries and keys in an encoder, as {names} '
        f'do, got {type(built).__name__}. Set '
        'layer_config.EncoderConfig.position.'
      )

  @property
  def hidden_rate(self) -> float:
    """Rate of dropout on the hidden units of an MLP."""
    if self.hidden_dropout is None:
      return self.dropout
    return self.hidden_dropout

  @property
  def dropout_kind(self) -> Callable[..., nn.Module]:
    """Class in dropout.py that is used for activations."""
    return RowDropout if self.dropout_by_row else TiledDropout
