"""The layer of a core: attention, memory, MLP, and the gate of GUT.

"Investigating Recurrent Transformers with Dynamic Halt" (2024), section 3 and
eqs. 9-11.
"""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp

from meliad_rec.layers.core_attention import Attention
from meliad_rec.layers.core_config import CoreConfig
from meliad_rec.layers.experts import ExpertAttention
from meliad_rec.layers.experts import ExpertMLP
from meliad_rec.layers.experts import Experts

XAVIER = nn.initializers.xavier_uniform()
# That of kernels of linear maps in the authors' framework: uniform within 1 /
# sqrt(inputs). There biases are drawn so too; here they begin at 0.
FIRST = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')


class MLP(nn.Module):
  """Two linear maps, and dropout behind both.

  Attributes:
    config: choices.
    width: hidden units.
    first: draws the first weights.
  """

  config: CoreConfig
  width: int
  first: nn.initializers.Initializer = FIRST

  @nn.compact
  def __call__(self, n_BTD):
    config = self.config
    dense = lambda width, name: nn.Dense(
      width, dtype=config.dtype, kernel_init=self.first, name=name
    )
    drop = functools.partial(config.dropout_kind, config.dropout)
    h_BTF = drop()(dense(self.width, 'hidden')(n_BTD))
    y_BTD = dense(n_BTD.shape[-1], 'output')(config.activation(h_BTF))
    return drop()(y_BTD)


class CoreLayer(nn.Module):
  """Pre-norm self-attention, attention to memory, and an MLP.

  Attributes:
    config: sizes and choices.
    reads_memory: whether it attends to memory slots too.
    gated: whether a gate, in the place of the residual around all of it,
      decides for each number how much of the new takes the place of the old.
    experts: of self-attention and MLP, which then sow 'routes'; None: none.
  """

  config: CoreConfig
  reads_memory: bool = False
  gated: bool = False
  experts: Experts | None = None

  def setup(self):
    config = self.config
    if self.experts and self.experts.in_attention:
      self.attention = ExpertAttention(config, self.experts)
    else:
      self.attention = Attention(config)
    if self.reads_memory:
      self.memory_attention = Attention(config, own=False)
    self.mlp_norm = config.norm(dtype=config.dtype)
    # As in the authors' code, whose layers of TLB are drawn otherwise.
    first = FIRST if self.reads_memory else XAVIER
    if self.experts:
      self.mlp = ExpertMLP(config, self.experts)
    else:
      self.mlp = MLP(config, config.mlp_dim, first)
    if self.gated:
      self.gate_mlp = MLP(config, config.mlp_dim, first)

  def __call__(self, x_BTD, mask_BT, memory_BSD=None, source_BTD=None):
    """y_BTD.

    Args:
      x_BTD: the stream.
      mask_BT: False at padding, which nothing reads.
      memory_BSD: slots; None where the layer reads none.
      source_BTD: what keys and values are made of; None: of x_BTD.

    Raises:
      ValueError: memory for a layer that reads none, or the reverse.
    """
    if self.reads_memory != (memory_BSD is not None):
      raise ValueError(
        f'reads_memory is {self.reads_memory}, and the layer is given '
        f'{"no memory" if self.reads_memory else "memory slots"}; set '
        'core_layer.CoreLayer.reads_memory in a latent bottleneck, and nowhere '
        'else.'
      )
    source_BTD = x_BTD if source_BTD is None else source_BTD
    a_BTD = self.attention(x_BTD, source_BTD, mask_BT)
    if self.reads_memory:
      seen_BS = jnp.ones(memory_BSD.shape[:2], bool)
      a_BTD = self.memory_attention(a_BTD, memory_BSD, seen_BS)
    n_BTD = self.mlp_norm(a_BTD)
    y_BTD = a_BTD + self.mlp(n_BTD)  # eq. 9
    if not self.gated:
      return y_BTD
    g_BTD = jax.nn.sigmoid(self.gate_mlp(n_BTD).astype(jnp.float32))  # eq. 10
    y_BTD = g_BTD * y_BTD + (1 - g_BTD) * x_BTD  # eq. 11
    return y_BTD.astype(x_BTD.dtype)
