"""Layer whose tokens attend to a window, to memory slots, to an encoder."""

from collections.abc import Callable
import functools

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from meliad_rec.kernels.blocks import Dropout
from meliad_rec.kernels.dispatch import memory_attention
from meliad_rec.kernels.dispatch import window_attention
from meliad_rec.kernels.reference import AttentionInputs
from meliad_rec.kernels.reference import memory_weights
from meliad_rec.kernels.reference import MemoryInputs
from meliad_rec.kernels.reference import merge_heads
from meliad_rec.kernels.reference import normalize_and_scale
from meliad_rec.kernels.reference import repeat_kv_heads
from meliad_rec.kernels.reference import window_weights
from meliad_rec.layers import gates
from meliad_rec.layers.attention import Heads
from meliad_rec.layers.attention import KV
from meliad_rec.layers.dropout import PositionDropout
from meliad_rec.layers.dropout import TiledDropout
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.layers.linear import all_but_bias
from meliad_rec.layers.linear import dot_general
from meliad_rec.layers.linear import with_cheap_gradient
from meliad_rec.layers.remat import SUMS
from meliad_rec.metrics import pictures
from meliad_rec.metrics import state_use


class Layer(nn.Module):
  """Attention, then an MLP, each with a norm before it or after its sum.

  If `config.cross` is True, attention to a source, the output of an encoder,
  is between them.

  The norms are before the sublayers unless `config.post_norm` is True.

  Attributes:
    config, has_memory, position: see Attention.
    sequential: whether tokens attend to memory after their attention to past
      has been added to the residual stream, as in the decoder of Vaswani et al.
      2017. If False, they attend to both at once.
  """

  config: LayerConfig
  has_memory: bool = False
  position: nn.Module | None = None
  sequential: bool = False

  def setup(self):
    config = self.config
    residual = functools.partial(gates.Residual, scale=config.output_scale)
    attention = functools.partial(
      Attention,
      config,
      self.has_memory,
      rate=config.dropout,
      attention_rate=config.attention_rate,
      join=residual,
      position=self.position,
    )
    self.attention = attention()
    if self.sequential:
      self.memory_attention = attention()
    if config.cross:
      self.cross_attention = cross_attention(config, residual)
    self.mlp_norm = config.norm(dtype=config.dtype)
    residual = functools.partial(
      residual,
      rate=config.dropout,
      dropout=config.dropout_kind,
      use_bias=config.mlp_bias,
    )
    self.mlp = FeedForward(
      config.mlp_dim,
      config.dtype,
      residual,
      config.activation,
      config.mlp_bias,
      config.hidden_dropout,
      config.dropout_kind,
    )

  def pre_norm(self, x_BTD):
    return self.attention.pre_norm(x_BTD)

  def kv(self, n_BTD, mask_BT, unnormalized=False) -> KV:
    return self.attention.kv(n_BTD, mask_BT, unnormalized)

  def source_kv(self, encoded_BSD, mask_BS) -> KV:
    """Returns keys and values of an encoded sequence; see Cell.source_kv.

    Raises:
      ValueError: `config.cross` is False.
    """
    if not self.config.cross:
      raise ValueError(
        'The model has an encoder, but its layers have no attention to it. Set '
        'layer_config.LayerConfig.cross = True, as options/encoder/transformer '
        'does.'
      )
    return self.cross_attention.kv(encoded_BSD, mask_BS)

  def __call__(
    self,
    x_BTD,
    n_BTD,
    past: KV,
    memory: KV | None = None,
    newest: KV | None = None,
    first=None,
    source_kv: KV | None = None,
  ):
    """Returns y_BTD, the residual stream after the layer.

    Args:
      x_BTD: the residual stream before the layer.
      n_BTD: the result of `pre_norm` for x_BTD.
      past: keys and values of earlier tokens, and then of x_BTD.
      memory: keys and values of memory slots; None means that there are none.
      newest: the part of `memory` that the last `window` tokens read. If it is
        given, the entropy of their attention to it is sown.
      first: int, position of the first token in the segment. If it is given,
        dropout of attention to past, of attention to a source and of hidden
        units has a mask for each position, and does not depend on which tokens
        are processed at once.
      source_kv: the result of the method `source_kv`; None means that there is
        none.
    """
    attention = self.attention
    heads = [attention.attend_window(n_BTD, past, first)]
    if self.sequential:
      x_BTD = attention.project(x_BTD, *heads)
      attention, heads = self.memory_attention, []
      n_BTD = attention.pre_norm(x_BTD)
    if newest is not None:
      W = self.config.window
      attention.sow_memory(n_BTD[:, -W:], past.mask[:, -W:], newest)
    if memory is not None:
      heads.append(attention.attend_memory(n_BTD, memory))
    return self.mlp_output(attention.project(x_BTD, *heads), first, source_kv)

  def output(self, x_BTD, *heads_BTF):
    """Returns y_BTD, the residual stream after the layer.

    Args:
      x_BTD: the residual stream before the layer.
      *heads_BTF: results of attention, as in Attention.project.
    """
    return self.mlp_output(self.attention.project(x_BTD, *heads_BTF))

  def mlp_output(self, x_BTD, first=None, source_kv: KV | None = None):
    """Returns y_BTD, the residual stream after the layer.

    Args:
      x_BTD: the residual stream after attention to past and to memory.
      first, source_kv: see `__call__`.

    Raises:
      ValueError: there is no source, although `config.cross` is True.
    """
    attended, output = SUMS
    x_BTD = checkpoint_name(x_BTD, attended)
    if self.config.cross:
      x_BTD = self.cross_attention.read_source(x_BTD, source_kv, first)
    if self.config.post_norm:
      y_BTD = self.mlp_norm(self.mlp(x_BTD, x_BTD, first))
    else:
      y_BTD = self.mlp(x_BTD, self.mlp_norm(x_BTD), first)
    return checkpoint_name(y_BTD, output)


class Query(nn.Module):
  """Linear map from n_BTD to (queries, scale).

  Queries are [B, T, H, K]. If config.normalize_qk is True, scale is [H]; the
  caller must L2-normalize the queries and multiply them by the scale.
  Otherwise, scale is None, and the queries are already scaled.

  Attributes:
    config: sizes and choices.
    has_positions: whether the keys have positions; see
      LayerConfig.memory_qk_scale.
  """

  config: LayerConfig
  has_positions: bool = True

  @nn.compact
  def __call__(self, n_BTD):
    config = self.config
    dims = config.num_heads, config.head_dim
    q_BTHK = Heads(*dims, False, config.dtype, name='heads')(n_BTD)
    if not config.normalize_qk:
      return q_BTHK * config.head_dim**-0.5, None
    initial = None if self.has_positions else config.memory_qk_scale
    initial = config.qk_scale if initial is None else initial
    init = nn.initializers.constant(initial)
    scale_H = self.param('scale', init, (config.num_heads,))
    return q_BTHK, jnp.abs(scale_H)


class Attention(nn.Module):
  """Attention to past and memory, joined with the residual stream.

  Its norm is applied before attention, or, if `config.post_norm` is True, to
  the sum of the residual stream and the result of attention.

  There are two sets of keys, `past` and `memory`, each with its own queries. By
  default, keys of `past` have positions, and a query sees a window of them.
  Keys of `memory` have no positions. Architectures differ in what they store in
  each set.

  Attributes:
    config: sizes and choices, shared by the layers.
    has_memory: whether there are queries for `memory`.
    has_positions: whether keys of `past` have positions. If False, they are
      read by `attend_slots` instead of `attend_window`.
    rate: rate of dropout on the result of `pre_norm`.
    attention_rate: rate of dropout on attention probabilities. Attention to
      `memory` has no dropout.
    join: a class from gates.py.
    position: position module that several layers share. None means that this
      module makes its own.
  """

  config: LayerConfig
  has_memory: bool = False
  has_positions: bool = True
  rate: float = 0.0
  attention_rate: float = 0.0
  join: Callable[..., nn.Module] = gates.Residual
  position: nn.Module | None = None

  def setup(self):
    config = self.config
    self.norm = config.norm(dtype=config.dtype)
    self.dropout = config.dropout_kind(self.rate)
    self.query = Query(config, self.has_positions)
    dims = config.kv_heads, config.head_dim
    self.key = Heads(*dims, config.normalize_qk, config.dtype)
    self.value = Heads(*dims, False, config.dtype)
    if self.has_memory:
      self.memory_query = Query(config, has_positions=False)
    if self.has_positions:
      self.relative = self.position
      if self.position is None:
        self.relative = config.position(config.num_heads, name='position')
      if config.span:
        self.span = config.span(config.num_heads)
    self.output = self.join(dtype=config.dtype)

  def pre_norm(self, x_BTD):
    """Returns n_BTD, the norm of x_BTD with dropout.

    Queries, keys and values are computed from it. If `config.post_norm` is
    True, it is x_BTD with dropout.
    """
    return self.dropout(x_BTD if self.config.post_norm else self.norm(x_BTD))

  def kv(self, n_BTD, mask_BT=None, unnormalized=False) -> KV:
    """Returns keys and values of tokens.

    Args:
      n_BTD: the result of `pre_norm` for the tokens.
      mask_BT: bool, False at padding; None means that there is no padding.
      unnormalized: whether keys may be left unnormalized; see KV.unnormalized.
    """
    if mask_BT is None:
      mask_BT = jnp.ones(n_BTD.shape[:2], bool)
    unnormalized = unnormalized and self.config.normalize_qk
    newest = n_BTD.shape[1] if unnormalized else 0
    return KV(self.key(n_BTD, unnormalized), self.value(n_BTD), mask_BT, newest)

  def attend_window(self, n_BTD, past: KV, first=None):
    """Returns heads [B, T, H K]: the result of attention to `past`.

    Args:
      n_BTD: the result of `pre_norm`, from which queries are computed.
      past: keys and values; the last T belong to the T tokens in n_BTD.
      first: see Layer.__call__.
    """
    config = self.config
    q_BTHK, scale_H = self.query(n_BTD)
    nearest = 0 if config.include_self else 1
    steps_back = np.arange(config.window) + nearest
    bias_HW = self.relative.bias(steps_back)
    if config.compat_meliad and scale_H is not None:
      bias_HW = bias_HW * scale_H[:, None]
    if config.span:
      bias_HW += self.span.bias(config.window)
    if not self.relative.keeps_length:
      q_BTHK, scale_H = scaled(q_BTHK, scale_H), None
      past = past.normalized()
    inputs = AttentionInputs(
      self.relative.rotate(q_BTHK, 0),
      self.relative.rotate_keys(past.k, n_BTD.shape[1] - past.k.shape[1]),
      past.v,
      past.mask,
      bias_HW,
      scale_H=scale_H,
      keys_WK=self.relative.keys(steps_back, config.head_dim),
      include_self=config.include_self,
      normalize_own=past.unnormalized > 0,
    )
    pictures.sow(self, 'token_to_token', lambda: window_weights(inputs))
    dropout = self.probability_dropout(first)
    return merge_heads(window_attention(inputs, dropout, config.attention))

  def attend_memory(self, n_BTD, memory: KV):
    """Returns heads [B, T, H K]: the result of attention to `memory`.

    Its probabilities have no dropout, as in google-research/meliad.

    Args:
      n_BTD: the result of `pre_norm`, from which queries are computed.
      memory: keys and values, in B rows or in n B rows. In the latter case, the
        T tokens of each row are cut into n blocks, and block i of row b reads
        row b n + i of memory.
    """
    B, T, _ = n_BTD.shape
    rows = len(memory.mask)
    W = B * T // rows
    q_BTHK, scale_H = self.memory_query(n_BTD)
    q_BWHK = q_BTHK.reshape(rows, W, *q_BTHK.shape[2:])
    name = 'token_to_state' if self.has_positions else 'state_to_token'
    return self.attend_slots(q_BWHK, scale_H, memory, name).reshape(B, T, -1)

  def read_source(self, x_BTD, source_kv: KV | None, first=None):
    """Returns the residual stream joined with attention to a source.

    Args:
      x_BTD: the residual stream.
      source_kv: keys and values of an encoded sequence, in B rows or in fewer;
        see `attend_slots`.
      first: see Layer.__call__.

    Raises:
      ValueError: there is no source.
    """
    if source_kv is None:
      raise ValueError(
        'Layers attend to the output of an encoder, but the model has none. '
        'Set model.Model.encoder, as options/encoder/transformer does, or '
        'layer_config.LayerConfig.cross = False.'
      )
    n_BTD = self.pre_norm(x_BTD)
    dropout = self.probability_dropout(first)
    heads_BTF = self.attend_slots(
      *self.query(n_BTD), source_kv, 'token_to_source', dropout
    )
    return self.project(x_BTD, heads_BTF)

  def sow_memory(self, n_BTD, mask_BT, memory: KV) -> None:
    """Sows the entropy of attention to memory; see state_use.sow_attention.

    Args:
      n_BTD: the result of `pre_norm`, from which queries are computed.
      mask_BT: bool, False at padding.
      memory: keys of slots, all of them visible.
    """
    q_BTHK = scaled(*self.memory_query(n_BTD))
    (k_BSHK,) = repeat_kv_heads(q_BTHK.shape[2], memory.normalized().k)
    logits_BHTS = jnp.einsum('bthk,bshk->bhts', q_BTHK, k_BSHK)
    state_use.sow_attention(self, logits_BHTS, mask_BT)

  def attend_slots(
    self,
    q_BTHK,
    scale_H,
    kv: KV,
    picture: str,
    dropout: Dropout | None = None,
  ):
    """Returns heads [B, T, H K]: the result of attention without positions.

    Args:
      q_BTHK, scale_H: the results of a Query.
      kv: keys and values, in B rows, or in fewer that each serve equally many
        consecutive rows of queries, such as the hypotheses of a beam search.
      picture: name in pictures.AXES of the attention weights.
      dropout: dropout of the attention probabilities; None means no dropout.
    """
    (B, T), kv = q_BTHK.shape[:2], kv.normalized()
    q_BTHK = q_BTHK.reshape(len(kv.mask), -1, *q_BTHK.shape[2:])
    inputs = MemoryInputs(q_BTHK, kv.k, kv.v, kv.mask, scale_H)
    pictures.sow(self, picture, lambda: memory_weights(inputs))
    implementation = self.config.attention
    y_BTHK = memory_attention(inputs, dropout, implementation)
    return merge_heads(y_BTHK).reshape(B, T, -1)

  def project(self, x_BTD, *heads_BTF):
    """Returns the residual stream joined with heads, [B, T, D].

    Args:
      x_BTD: the residual stream.
      *heads_BTF: one or two sets of heads; F = H K.
    """
    h = heads_BTF[0] if len(heads_BTF) == 1 else jnp.stack(heads_BTF, 2)
    y_BTD = self.output(x_BTD, h)
    return self.norm(y_BTD) if self.config.post_norm else y_BTD

  def probability_dropout(self, first=None) -> Dropout | None:
    """Returns the dropout of attention probabilities; None means no dropout.

    Args:
      first: see Layer.__call__.
    """
    if not self.attention_rate or not self.has_rng('dropout'):
      return None
    return Dropout(self.make_rng('dropout'), self.attention_rate, first)


def cross_attention(config: LayerConfig, join: Callable) -> Attention:
  """Returns attention to the output of an encoder, with its own projections.

  Keys and values have no positions: the encoder's output has them.

  Args:
    config: sizes and choices of the layer.
    join: a class from gates.py.
  """
  return Attention(
    config,
    has_positions=False,
    rate=config.dropout,
    attention_rate=config.attention_rate,
    join=join,
  )


class FeedForward(nn.Module):
  """MLP that maps h [B, T, any width] and joins the result with x_BTD.

  Attributes:
    width: number of hidden units.
    dtype: dtype of activations.
    join: a class from gates.py, which contains the second linear map.
    activation: function of the hidden units, such as jax.nn.relu.
    use_bias: whether the first linear map has a bias.
    rate: rate of dropout on the hidden units, after the activation.
    dropout: a class from dropout.py, for calls without `first`.
  """

  width: int
  dtype: str
  join: Callable[..., nn.Module]
  activation: Callable = jax.nn.relu
  use_bias: bool = False
  rate: float = 0.0
  dropout: Callable[..., nn.Module] = TiledDropout

  @nn.compact
  def __call__(self, x_BTD, h, first=None):
    """Returns the join of x and of the MLP's result, [B, T, D].

    Args:
      x_BTD: residual stream.
      h: input of the MLP, [B, T, any width], often the norm of x_BTD.
      first: see Layer.__call__.
    """
    hidden = nn.Dense(
      self.width,
      use_bias=self.use_bias,
      dtype=self.dtype,
      promote_dtype=all_but_bias,
      dot_general=dot_general,
      name='hidden',
    )
    join = self.join(dtype=self.dtype, name='output')
    h = with_cheap_gradient(self.activation)(hidden(h).astype(self.dtype))
    if first is None:
      h = self.dropout(self.rate)(h)
    else:
      h = PositionDropout(self.rate)(h, first)
    return join(x_BTD, h)


def scaled(q_BTHK, scale_H):
  """Returns queries whose products with keys are logits.

  The arguments are the results of a Query.
  """
  return q_BTHK if scale_H is None else normalize_and_scale(q_BTHK, scale_H)
