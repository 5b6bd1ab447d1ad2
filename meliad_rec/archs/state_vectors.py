"""The horizontal direction of the Block-Recurrent Transformer.

State vectors attend to themselves and to the tokens of two blocks, and pass
through gates. Hutchins et al. 2022, sections 3.2-3.5.
"""

from collections.abc import Callable
import functools

from flax import linen as nn
import jax.numpy as jnp

from meliad_rec import gates
from meliad_rec.attention import KV
from meliad_rec.layer_config import LayerConfig
from meliad_rec.sublayers import Attention
from meliad_rec.sublayers import FeedForward


class StateVectors(nn.Module):
  """The horizontal direction: S state vectors and their update.

  Attributes:
    config: sizes, shared with the tokens.
    slots: state vectors S.
    gate: a gate of gates.py.
    gate_config: 'dual' (attention, then MLP, a gate behind each), 'single' (one
      gate behind both) or 'skip' (no MLP); section 3.5.
  """

  config: LayerConfig
  slots: int
  gate: Callable[..., nn.Module] = gates.FixedGate
  gate_config: str = 'skip'

  def setup(self):
    if self.slots < 1:
      raise ValueError(
        f'There are {self.slots} state vectors; set SLOTS to 1 or more.'
      )
    config = self.config
    gate = self.gate
    if config.compat_meliad:
      gate = functools.partial(gate, tanh=self.gate_config == 'single')
    match self.gate_config:
      case 'dual' | 'skip':
        join = gate
      case 'single':
        join = None
      case _:
        raise ValueError(
          f'gate_config is {self.gate_config!r}; it must be dual, single or '
          'skip.'
        )
    self.attention = Attention(
      config, has_memory=True, in_order=False, join=join
    )
    if self.gate_config == 'dual':
      self.mlp_norm = config.norm(dtype=config.dtype)
    if self.gate_config != 'skip':
      self.mlp = FeedForward(
        config.mlp_width,
        config.dtype,
        gate,
        config.activation,
        config.mlp_bias,
      )
    shape = self.slots, config.d_model
    self.ids_SD = self.param('ids', nn.initializers.normal(1.0), shape)
    self.first_SD = self.param('first', nn.initializers.normal(0.1), shape)

  def first(self, batch: int):
    """Learned states at the start of a document: [B, S, D] float32."""
    return jnp.broadcast_to(self.first_SD, (batch, *self.first_SD.shape))

  def enter(self, s_BSD):
    """States as attention sees them, with their learned identities."""
    n_BSD = self.attention.enter(s_BSD)
    return n_BSD + self.ids_SD.astype(n_BSD.dtype)

  def kv(self, n_BSD) -> KV:
    """What tokens see of the states, which `enter` gave as n_BSD."""
    return self.attention.kv(n_BSD)

  def update(self, s_BSD, n_BSD, kv_states: KV, kv_tokens: KV):
    """The states after a block.

    Args:
      s_BSD: states as the block begins.
      n_BSD: `enter` of them.
      kv_states: `kv` of them. Projecting them again would cost as much as a
        gate, since XLA never joins the two backward passes.
      kv_tokens: the previous block and this one.
    """
    h = self.attention.write(
      s_BSD,
      self.attention.read_past(n_BSD, kv_states),
      self.attention.read_memory(n_BSD, kv_tokens),
    )
    match self.gate_config:
      case 'skip':
        return h
      case 'dual':
        return self.mlp(h, self.mlp_norm(h))
      case 'single':
        # As one matrix: cut over three mesh axes, XLA 0.10 multiplies by a
        # [C, H K, F] kernel wrongly in the backward pass.
        return self.mlp(s_BSD, h.reshape(*h.shape[:2], -1))
