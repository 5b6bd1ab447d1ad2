"""Encoder layer: self-attention and MLP, with optional memory and gate.

Section 3 and eqs. 9-11 of "Investigating Recurrent Transformers with Dynamic
Halt" (Ray Chowdhury and Caragea 2024). Five models of that paper are built from
this layer: the plain transformer, the universal transformer (UT), the gated UT
(GUT), and the temporal latent bottleneck (TLB), alone and with GUT (GUTLB).
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from meliad_rec.layers import gates
from meliad_rec.layers.attention import attend
from meliad_rec.layers.attention import attention_weights
from meliad_rec.layers.attention import Heads
from meliad_rec.layers.dropout import attention_keep
from meliad_rec.layers.experts import ExpertAttention
from meliad_rec.layers.experts import ExpertMLP
from meliad_rec.layers.experts import Experts
from meliad_rec.layers.layer_config import EncoderConfig
from meliad_rec.layers.linear import all_but_bias
from meliad_rec.metrics import pictures

XAVIER = nn.initializers.xavier_uniform()
# The default of linear maps in PyTorch, which the authors use: uniform within
# 1 / sqrt(inputs). PyTorch draws biases in the same way; here they begin at 0.
UNIFORM = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')


class EncoderLayer(nn.Module):
  """Self-attention, optional attention to memory, and an MLP.

  The norms are before these sublayers unless `config.post_norm` is True.

  Attributes:
    config: sizes and choices.
    reads_memory: whether the layer also attends to memory slots.
    gated: whether the layer's output passes through a gate, which chooses for
      each element how much of it replaces the layer's input.
    experts: settings of the experts of the MLP and of self-attention. Their
      routers sow the collection 'routes'; see experts.py. None means that there
      are no experts.
  """

  config: EncoderConfig
  reads_memory: bool = False
  gated: bool = False
  experts: Experts | None = None

  def setup(self):
    config = self.config
    if self.experts and self.experts.in_attention:
      self.attention = ExpertAttention(config, self.experts)
    else:
      self.attention = EncoderAttention(config)
    if self.reads_memory:
      self.memory_attention = EncoderAttention(config, 'token_to_state')
    self.mlp_norm = config.norm(dtype=config.dtype)
    # As in the authors' code, which initializes the layers of TLB differently.
    kernel_init = UNIFORM if self.reads_memory else XAVIER
    if self.experts:
      self.mlp = ExpertMLP(config, self.experts)
    else:
      self.mlp = EncoderMLP(config, config.mlp_dim, kernel_init)
    if self.gated:
      self.gate_mlp = EncoderMLP(config, config.mlp_dim, kernel_init)

  def __call__(self, x_BTD, mask_BT, memory_BSD=None, source_BTD=None):
    """Returns y_BTD, the residual stream after the layer.

    Args:
      x_BTD: the residual stream.
      mask_BT: bool, False at padding. No token attends to padding.
      memory_BSD: memory slots; None if the layer reads none.
      source_BTD: vectors from which self-attention computes keys and values;
        None means x_BTD.

    Raises:
      ValueError: memory_BSD is given although reads_memory is False, or None
        although it is True.
    """
    if self.reads_memory != (memory_BSD is not None):
      raise ValueError(
        f'reads_memory is {self.reads_memory}, but the layer was given '
        f'{"no memory" if self.reads_memory else "memory slots"}. Set '
        'encoder_layer.EncoderLayer.reads_memory to True in a latent '
        'bottleneck and to False elsewhere.'
      )
    source_BTD = x_BTD if source_BTD is None else source_BTD
    a_BTD = self.attention(x_BTD, source_BTD, mask_BT)
    if self.reads_memory:
      seen_BS = jnp.ones(memory_BSD.shape[:2], bool)
      a_BTD = self.memory_attention(a_BTD, memory_BSD, seen_BS)
    post_norm = self.config.post_norm
    n_BTD = a_BTD if post_norm else self.mlp_norm(a_BTD)
    y_BTD = a_BTD + self.mlp(n_BTD)  # eq. 9
    if post_norm:
      y_BTD = self.mlp_norm(y_BTD)
    if not self.gated:
      return y_BTD
    g_BTD = jax.nn.sigmoid(self.gate_mlp(n_BTD).astype(jnp.float32))  # eq. 10
    pictures.sow(self, 'token_write', lambda: g_BTD)
    pictures.sow(self, 'token_keep', lambda: 1 - g_BTD)
    y_BTD = g_BTD * y_BTD + (1 - g_BTD) * x_BTD  # eq. 11
    return y_BTD.astype(x_BTD.dtype)


class EncoderAttention(nn.Module):
  """Attention, added to the residual stream.

  Its norm is applied before attention, or, if `config.post_norm` is True, to
  the sum.

  Attributes:
    config: sizes and choices.
    kind: from what to what attention goes, a name in pictures.AXES. In
      'token_to_token' queries and keys are computed from the same tokens.
      Otherwise, the source always has a norm of its own before attention, there
      are no positions, and every query sees all unmasked vectors of the source.
  """

  config: EncoderConfig
  kind: str = 'token_to_token'

  @property
  def cross(self) -> bool:
    """Whether keys are computed from another sequence than queries."""
    return self.kind != 'token_to_token'

  def setup(self):
    config = self.config
    dims = config.num_heads, config.head_dim, False, config.dtype
    half = nn.initializers.variance_scaling(0.5, 'fan_avg', 'uniform')
    self.norm = config.norm(dtype=config.dtype)
    if self.cross:
      self.source_norm = config.norm(dtype=config.dtype)
    self.query, self.key = Heads(*dims, half), Heads(*dims, half)
    self.value = Heads(*dims, half)
    if not self.cross:
      self.relative = config.position(config.num_heads)
    self.output = gates.Residual(
      config.dtype,
      config.dropout,
      config.dropout_kind,
      kernel_init=nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform'),
    )

  def __call__(self, x_BTD, source_BSD, mask_BS):
    """Returns the residual stream plus the result of attention, [B, T, D].

    Args:
      x_BTD: the residual stream, from which queries are computed.
      source_BSD: vectors from which keys and values are computed.
      mask_BS: bool, True at vectors of the source that may be seen.
    """
    config = self.config
    (B, T, _), S = x_BTD.shape, source_BSD.shape[1]
    pre_norm = (lambda x_BTD: x_BTD) if config.post_norm else self.norm
    n_BTD = pre_norm(x_BTD)
    n_BSD = (self.source_norm if self.cross else pre_norm)(source_BSD)
    relative = None if self.cross else self.relative
    q_BTHK = self.query(n_BTD) * config.head_dim**-0.5
    k_BSHK, causal = self.key(n_BSD), config.causal
    weights = lambda: attention_weights(
      relative, q_BTHK, k_BSHK, mask_BS, causal
    )
    pictures.sow(self, self.kind, weights)
    y_BTHK = attend(
      relative,
      q_BTHK,
      k_BSHK,
      self.value(n_BSD),
      mask_BS,
      causal=causal,
      keep=attention_keep(
        self,
        config.attention_dropout,
        (B, config.num_heads, T, S),
        config.dropout_by_row,
      ),
      dropout_rate=config.attention_dropout,
    )
    # Heads as one axis, so that the output weights are sharded by heads.
    y_BTD = self.output(x_BTD, y_BTHK.reshape(B, T, -1))
    return self.norm(y_BTD) if config.post_norm else y_BTD


class EncoderMLP(nn.Module):
  """MLP with one hidden layer; dropout follows both of its linear maps.

  Attributes:
    config: gives the activation, dropout and dtype.
    width: number of hidden units.
    kernel_init: initializer of the weights.
  """

  config: EncoderConfig
  width: int
  kernel_init: nn.initializers.Initializer = UNIFORM

  @nn.compact
  def __call__(self, n_BTD):
    config = self.config

    def dense(width, name, h):
      linear = nn.Dense(
        width,
        dtype=config.dtype,
        promote_dtype=all_but_bias,
        kernel_init=self.kernel_init,
        name=name,
      )
      return linear(h).astype(config.dtype)

    h_BTF = dense(self.width, 'hidden', n_BTD)
    h_BTF = config.dropout_kind(config.hidden_rate)(h_BTF)
    y_BTD = dense(n_BTD.shape[-1], 'output', config.activation(h_BTF))
    return config.dropout_kind(config.dropout)(y_BTD)
