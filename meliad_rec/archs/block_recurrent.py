"""Block-Recurrent Transformer layer (Hutchins et al. 2022, sections 3.1-3.5).

Vertically, tokens attend to their window and to the state vectors as they were
when the block began. Horizontally, state vectors attend to themselves and to
the tokens of the previous and the own block, and pass through gates.
"""

from collections.abc import Callable

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec import gates
from meliad_rec.archs.state_vectors import StateVectors
from meliad_rec.attention import KV
from meliad_rec.cell import Cell
from meliad_rec.cell import scan_blocks
from meliad_rec.cell import to_blocks
from meliad_rec.layer import Layer
from meliad_rec.layer_config import LayerConfig
from meliad_rec.remat import remat


class Opened(struct.PyTreeNode):
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
  def recurs(self):
    return True

  @property
  def streams(self):
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

  def summary(self, state):
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
    return state, self.finish(block, heads)

  def seen(self, state):
    """The states as attention enters them, n_BSD, and what is seen of them."""
    n_BSD = self.states.enter(state[1])
    return n_BSD, self.states.kv(n_BSD)

  def recur(self, state, block, n_BSD, memory: KV):
    """The state after a block, and the heads of both sources of its tokens."""
    past, s_BSD = state
    n_BWD = self.tokens.enter(block.x)
    kv = past.append(self.tokens.kv(n_BWD, block.mask))
    attention = self.tokens.attention
    heads = attention.read_past(n_BWD, kv), attention.read_memory(n_BWD, memory)
    s_BSD = self.update(s_BSD, n_BSD, memory, kv)
    return (kv.last(self.config.window), s_BSD), heads

  def update(self, s_BSD, n_BSD, memory: KV, kv: KV):
    """States behind a block; as they were where all of it is padding."""
    new_BSD = self.states.update(s_BSD, n_BSD, memory, kv)
    real_B = jnp.any(kv.mask[:, self.config.window :], 1)
    return jnp.where(real_B[:, None, None], new_BSD, s_BSD)

  def finish(self, block, heads):
    """What does not recur: outputs, from the heads of both sources."""
    return self.tokens.finish(block.x, *heads)

  def open(self, state):
    past, s_BSD = state
    unread = jax.tree.map(jnp.zeros_like, past)
    filled_B = jnp.zeros(s_BSD.shape[0], jnp.int32)
    _, memory = self.seen(state)
    return Opened(past.append(unread), s_BSD, memory, filled_B)

  def step(self, opened, block):
    W, filled = self.config.window, opened.filled_B[0]
    n_B1D = self.tokens.enter(block.x)
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

  def next_block(self, opened: Opened) -> Opened:
    """A full block closed, and the next one opened."""
    s_BSD = opened.states_BSD
    n_BSD = self.states.enter(s_BSD)
    s_BSD = self.update(s_BSD, n_BSD, opened.memory, opened.kv)
    return self.open((opened.kv.last(self.config.window), s_BSD))

  def close(self, opened):
    return (
      jax.tree.map(lambda a: a[:, : self.config.window], opened.kv),
      opened.states_BSD,
    )
