"""Block-Recurrent Transformer layer (Hutchins et al. 2022, sections 3.1-3.5).

Vertically, tokens attend to their window and to the state vectors as they were
when the block began. Horizontally, state vectors attend to themselves and to
the tokens of the previous and the own block, and pass through gates.

The horizontal direction of the Block-Recurrent Transformer.

State vectors attend to themselves and to the tokens of two blocks, and pass
through gates. Hutchins et al. 2022, sections 3.2-3.5.
"""

from collections.abc import Callable
import functools

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.layers import gates
from meliad_rec.layers.attention import KV
from meliad_rec.layers.layer import Attention
from meliad_rec.layers.layer import FeedForward
from meliad_rec.layers.layer import Layer
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.layers.remat import remat
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import scan_blocks
from meliad_rec.models.cell import to_blocks


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
        config.mlp_dim,
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

  def pre_norm(self, s_BSD):
    """States as attention sees them, with their learned identities."""
    n_BSD = self.attention.pre_norm(s_BSD)
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
    h = self.attention.project(
      s_BSD,
      self.attention.attend_window(n_BSD, kv_states),
      self.attention.attend_memory(n_BSD, kv_tokens),
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


class DecodeState(struct.PyTreeNode):
  """State within a block, for token by token reading."""

  kv: KV  # The previous block, then the open one; masked where still empty.
  states_BSD: jax.Array  # As the open block began.
  memory: KV  # What tokens see of these states.
  filled_B: jax.Array  # Tokens in the open block; the same in every row.


class BlockRecurrentLayer(Cell):
  """State: keys and values of the last `window` tokens, and S state vectors.

  Attributes:
    config, slots, gate, gate_config: see StateVectors.
    hoist: whether the output map and the MLP of the tokens, which do not
      recur, run for the whole segment at once, behind the scan over blocks.
      They then keep what their backward pass needs, whatever `remat` says.
  """

  config: LayerConfig
  slots: int
  gate: Callable[..., nn.Module] = gates.FixedGate
  gate_config: str = 'skip'
  hoist: bool = True

  @property
  def block_length(self):
    return self.config.window

  @property
  def takes_segments(self):
    return self.hoist

  @property
  def scans_blocks(self):
    return self.hoist

  @property
  def is_recurrent(self):
    return True

  @property
  def can_step(self):
    return True

  def setup(self):
    self.tokens = Layer(self.config, has_memory=True)
    self.states = StateVectors(
      self.config, self.slots, self.gate, self.gate_config
    )

  def initial_state(self, batch):
    return self.config.empty_past(batch), self.states.first(batch)

  def clear(self, state):
    past, s_BSD = state
    return past, self.states.first(s_BSD.shape[0])

  def memory_slots(self, state):
    return state[1]

  def __call__(self, state, block):
    W, (B, T) = self.config.window, block.mask.shape

    def body(layer, state, block):
      return layer.recur(state, block, *layer.seen(state))

    if T == W:
      state, heads = remat(body, self.remat)(self, state, block)
    else:
      blocks = jax.tree.map(lambda a: to_blocks(a, W), block)
      state, heads = scan_blocks(body, self, state, blocks)
      heads = [a.reshape(B, T, -1) for a in heads]
    return state, self.output(block, heads)

  def seen(self, state):
    """The states as attention enters them, n_BSD, and what is seen of them."""
    n_BSD = self.states.pre_norm(state[1])
    return n_BSD, self.states.kv(n_BSD)

  def recur(self, state, block, n_BSD, memory: KV):
    """The state after a block, and the heads of both sources of its tokens."""
    past, s_BSD = state
    n_BWD = self.tokens.pre_norm(block.x)
    kv = past.append(self.tokens.kv(n_BWD, block.mask))
    attention = self.tokens.attention
    heads = (
      attention.attend_window(n_BWD, kv),
      attention.attend_memory(n_BWD, memory),
    )
    s_BSD = self.update(s_BSD, n_BSD, memory, kv)
    return (kv.last(self.config.window), s_BSD), heads

  def update(self, s_BSD, n_BSD, memory: KV, kv: KV):
    """States behind a block; as they were where all of it is padding."""
    new_BSD = self.states.update(s_BSD, n_BSD, memory, kv)
    real_B = jnp.any(kv.mask[:, self.config.window :], 1)
    return jnp.where(real_B[:, None, None], new_BSD, s_BSD)

  def output(self, block, heads):
    """What does not recur: outputs, from the heads of both sources."""
    return self.tokens.output(block.x, *heads)

  def to_decode_state(self, state):
    past, s_BSD = state
    unread = jax.tree.map(jnp.zeros_like, past)
    filled_B = jnp.zeros(s_BSD.shape[0], jnp.int32)
    _, memory = self.seen(state)
    return DecodeState(past.append(unread), s_BSD, memory, filled_B)

  def decode_step(self, opened, block):
    W, filled = self.config.window, opened.filled_B[0]
    n_B1D = self.tokens.pre_norm(block.x)
    kv = jax.tree.map(
      lambda a, new: jax.lax.dynamic_update_slice_in_dim(a, new, W + filled, 1),
      opened.kv,
      self.tokens.kv(n_B1D, block.mask),
    )
    near = jax.tree.map(
      lambda a: jax.lax.dynamic_slice_in_dim(a, filled, W + 1, 1), kv
    )
    y_B1D = self.tokens(block.x, n_B1D, near, opened.memory)
    opened = opened.replace(kv=kv, filled_B=opened.filled_B + 1)
    return nn.cond(
      filled + 1 == W, self.next_block, lambda _, o: o, self, opened
    ), y_B1D

  def next_block(self, opened: DecodeState) -> DecodeState:
    """A full block closed, and the next one opened."""
    s_BSD = opened.states_BSD
    n_BSD = self.states.pre_norm(s_BSD)
    s_BSD = self.update(s_BSD, n_BSD, opened.memory, opened.kv)
    return self.to_decode_state((opened.kv.last(self.config.window), s_BSD))

  def to_segment_state(self, opened):
    return (
      jax.tree.map(lambda a: a[:, : self.config.window], opened.kv),
      opened.states_BSD,
    )
