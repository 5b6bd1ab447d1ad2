"""The usual layer: attention, then an MLP.

The two sublayers that all architectures share: attention and MLP.

Attention reads two kinds of source: `past`, keys that have a position relative
to the queries (window, position bias), and `memory`, slots that have none. Who
fills the two, and what is written back, is what tells architectures apart.
"""

from collections.abc import Callable
import functools

from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from meliad_rec.kernels.blocks import keep_mask
from meliad_rec.kernels.memory_attention import memory_attention
from meliad_rec.kernels.reference import scaled_unit
from meliad_rec.kernels.window_attention import window_attention
from meliad_rec.layers import activations
from meliad_rec.layers import gates
from meliad_rec.layers.attention import Heads
from meliad_rec.layers.attention import KV
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.layers.remat import SUMS


class Query(nn.Module):
  """Queries [B, T, H, K], and the scale [H] of unit ones; None: scaled."""

  config: LayerConfig

  @nn.compact
  def __call__(self, n_BTD):
    config = self.config
    dims = config.num_heads, config.head_dim
    q_BTHK = Heads(*dims, False, config.dtype, name='heads')(n_BTD)
    if not config.normalize_qk:
      return q_BTHK * config.head_dim**-0.5, None
    scale_H = self.param('scale', nn.initializers.ones, (config.num_heads,))
    return q_BTHK, jnp.abs(scale_H)


class Attention(nn.Module):
  """Pre-norm attention over past and memory, joined to the stream.

  Attributes:
    config: shared by the layers.
    has_memory: whether there are second queries, for memory.
    in_order: whether `past` has positions; if not, all its keys that are not
      masked are visible to every query.
    rate: of dropout.
    join: a class of gates.py; None hands the heads on as they are.
    position: built by the parent, to be shared; None: one of its own.
  """

  config: LayerConfig
  has_memory: bool = False
  in_order: bool = True
  rate: float = 0.0
  join: Callable[..., nn.Module] | None = gates.Residual
  position: nn.Module | None = None

  def setup(self):
    config = self.config
    self.norm = config.norm(dtype=config.dtype)
    self.dropout = config.dropout_kind(self.rate)
    self.query = Query(config)
    dims = config.kv_heads, config.head_dim
    self.key = Heads(*dims, config.normalize_qk, config.dtype)
    self.value = Heads(*dims, False, config.dtype)
    if self.has_memory:
      self.memory_query = Query(config)
    if self.in_order:
      self.relative = self.position
      if self.position is None:
        self.relative = config.position(config.num_heads, name='position')
      if config.span:
        self.span = config.span(config.num_heads)
    if self.join:
      self.output = self.join(dtype=config.dtype)

  def pre_norm(self, x_BTD):
    """What queries, keys and values are computed from: n_BTD."""
    return self.dropout(self.norm(x_BTD))

  def kv(self, n_BTD, mask_BT=None, unnormalized=False) -> KV:
    """What queries see of these tokens; raw: see KV.raw."""
    if mask_BT is None:
      mask_BT = jnp.ones(n_BTD.shape[:2], bool)
    unnormalized = unnormalized and self.config.normalize_qk
    newest = n_BTD.shape[1] if unnormalized else 0
    return KV(self.key(n_BTD, unnormalized), self.value(n_BTD), mask_BT, newest)

  def attend_window(self, n_BTD, past: KV):
    """Heads [B, T, H K] over `past`, which ends with the tokens' own keys."""
    config = self.config
    q_BTHK, scale_H = self.query(n_BTD)
    if not self.in_order:
      return self.attend_slots(q_BTHK, scale_H, past)
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
    y_BTHK = window_attention(
      self.relative.rotate(q_BTHK, 0),
      self.relative.rotate_keys(past.k, n_BTD.shape[1] - past.k.shape[1]),
      past.v,
      past.mask,
      bias_HW,
      scale_H=scale_H,
      keys_WK=self.relative.keys(steps_back, config.head_dim),
      include_self=config.include_self,
      normalize_own=past.unnormalized > 0,
      dropout_rng=self.dropout_rng(),
      dropout_rate=self.rate,
      form=config.attention_form,
    )
    return merge_heads(y_BTHK)

  def attend_memory(self, n_BTD, memory: KV):
    """Heads [B, T, H K] over memory slots.

    Memory of B n rows is that of n blocks: each block of tokens reads its own.
    """
    B, T, _ = n_BTD.shape
    rows = len(memory.mask)
    W = B * T // rows
    q_BTHK, scale_H = self.memory_query(n_BTD)
    q_BWHK = q_BTHK.reshape(rows, W, *q_BTHK.shape[2:])
    return self.attend_slots(q_BWHK, scale_H, memory).reshape(B, T, -1)

  def attend_slots(self, q_BTHK, scale_H, kv: KV):
    """Heads [B, T, H K] over keys in no order."""
    rng, keep_HTS = self.dropout_rng(), None
    if rng is not None:
      T, S = q_BTHK.shape[1], kv.mask.shape[1]
      keep_HTS = keep_mask(rng, self.rate, (self.config.num_heads, T, S))
    kv = kv.normalized()
    y_BTHK = memory_attention(
      q_BTHK,
      kv.k,
      kv.v,
      kv.mask,
      scale_H=scale_H,
      keep_HTS=keep_HTS,
      form=self.config.attention_form,
    )
    return merge_heads(y_BTHK)

  def project(self, x_BTD, *heads_BTF):
    """The stream joined with the heads of one source or of both."""
    h = heads_BTF[0] if len(heads_BTF) == 1 else jnp.stack(heads_BTF, 2)
    return self.output(x_BTD, h) if self.join else h

  def dropout_rng(self):
    """For attention probabilities; None: they are not dropped."""
    if not self.rate or self.config.locked_dropout:
      return None
    return self.make_rng('dropout') if self.has_rng('dropout') else None


class FeedForward(nn.Module):
  """MLP of h [B, T, any width], joined to x.

  Attributes:
    width: hidden units.
    dtype: of activations.
    join: a class of gates.py.
    activation: a function of activations.py.
    use_bias: of the hidden units.
  """

  width: int
  dtype: str
  join: Callable[..., nn.Module]
  activation: Callable = activations.relu
  use_bias: bool = False

  @nn.compact
  def __call__(self, x_BTD, h):
    hidden = nn.Dense(
      self.width, use_bias=self.use_bias, dtype=self.dtype, name='hidden'
    )
    join = self.join(dtype=self.dtype, name='output')
    return join(x_BTD, self.activation(hidden(h)))


def scaled(q_BTHK, scale_H):
  """Queries as they meet keys; see Query."""
  return q_BTHK if scale_H is None else scaled_unit(q_BTHK, scale_H)


def merge_heads(y_BTHK):
  return y_BTHK.reshape(*y_BTHK.shape[:2], -1)


class Layer(nn.Module):
  """Pre-norm attention, then a pre-norm MLP.

  Attributes:
    config, has_memory, position: see Attention.
  """

  config: LayerConfig
  has_memory: bool = False
  position: nn.Module | None = None

  def setup(self):
    config = self.config
    residual = functools.partial(gates.Residual, scale=config.output_scale)
    self.attention = Attention(
      config,
      self.has_memory,
      rate=config.dropout,
      join=residual,
      position=self.position,
    )
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
    )

  def pre_norm(self, x_BTD):
    return self.attention.pre_norm(x_BTD)

  def kv(self, n_BTD, mask_BT, unnormalized=False) -> KV:
    return self.attention.kv(n_BTD, mask_BT, unnormalized)

  def __call__(self, x_BTD, n_BTD, past: KV, memory: KV | None = None):
    """Outputs y_BTD; `past` ends with the tokens' own keys and values."""
    heads = [self.attention.attend_window(n_BTD, past)]
    if memory is not None:
      heads.append(self.attention.attend_memory(n_BTD, memory))
    return self.output(x_BTD, *heads)

  def output(self, x_BTD, *heads_BTF):
    """Outputs, from the heads of each source."""
    attended, output = SUMS
    x_BTD = self.attention.project(x_BTD, *heads_BTF)
    x_BTD = checkpoint_name(x_BTD, attended)
    y_BTD = self.mlp(x_BTD, self.mlp_norm(x_BTD))
    return checkpoint_name(y_BTD, output)
