"""Block-Recurrent Transformer layer (Hutchins et al. 2022, sections 3.1-3.5).

In the vertical direction, from layer to layer, tokens attend to their window
and to the state vectors as they were before the block. In the horizontal
direction, from block to block, each state vector attends to all state vectors
and to the tokens of the previous block and of this one. Gates then combine the
result with the old state vector.
"""

from collections.abc import Callable
import dataclasses
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
from meliad_rec.metrics import state_use
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import scan_blocks
from meliad_rec.models.cell import sow_slots
from meliad_rec.models.cell import to_blocks


class BlockDecodeState(struct.PyTreeNode):
  """State within a block, while decoding token by token.

  Attributes:
    kv: keys and values of the previous block and of this one; tokens that are
      not yet read are masked.
    states_BSD: state vectors before this block.
    memory: keys and values of these state vectors.
    filled_B: int32, number of tokens read in this block, the same in every row.
  """

  kv: KV
  states_BSD: jax.Array
  memory: KV
  filled_B: jax.Array


class BlockRecurrentLayer(Cell):
  """State: keys and values of the last `window` tokens, and S state vectors.

  Attributes:
    config, slots, gate, gate_config, sequential, ids_stddev, states_stddev: see
      StateVectors. If `sequential` is True, tokens too attend first to their
      window, then to the state vectors; see Layer.sequential.
    hoist: whether all tokens of a segment are processed at once, and only the
      state vectors block by block. This is possible because the update of the
      state vectors needs only the keys and values of the tokens. If True, the
      activations of the tokens are kept for the backward pass, whatever `remat`
      is. If False, tokens are processed block by block too.
  """

  config: LayerConfig
  slots: int
  gate: Callable[..., nn.Module] = gates.FixedGate
  gate_config: str = 'skip'
  hoist: bool = True
  sequential: bool = False
  ids_stddev: float = 1.0
  states_stddev: float = 0.1

  is_recurrent = True
  can_step = True

  @property
  def block_length(self):
    return self.config.window

  @property
  def takes_segments(self):
    return self.hoist

  @property
  def scans_blocks(self):
    return self.hoist

  def setup(self):
    self.tokens = Layer(
      self.config, has_memory=True, sequential=self.sequential
    )
    self.states = StateVectors(
      self.config,
      self.slots,
      self.gate,
      self.gate_config,
      self.sequential,
      self.ids_stddev,
      self.states_stddev,
    )

  def initial_state(self, batch):
    return self.config.empty_past(batch), self.states.initial_states(batch)

  def parts(self, state):
    return {'slots': state[1]}

  def with_parts(self, state, parts):
    return state[0], parts['slots']

  def memory_slots(self, state):
    return state[1]

  def __call__(self, state, block):
    W = self.config.window

    def body(layer, state, new):
      n_BSD, memory = layer.seen(state)
      return layer.recur(state, new, n_BSD, memory), memory

    past, _ = state
    n_BTD = self.tokens.pre_norm(block.x)
    new = self.tokens.kv(n_BTD, block.mask)
    blocks = jax.tree.map(lambda a: to_blocks(a, W), new)
    if block.mask.shape[1] == W:
      before_BNSD = state[1][:, None]
      # Without `hoist`, the caller applies `remat`, and sows the slots.
      policy = self.remat if self.hoist else 'none'
      state, memory = remat(body, policy)(self, state, new)
      if self.hoist:
        sow_slots(self, before_BNSD, state, blocks.mask)
      newest = memory
    else:
      state, memory = scan_blocks(body, self, state, blocks)
      newest = jax.tree.map(lambda a: a[:, -1], memory)
      memory = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), memory)
    y_BTD = self.tokens(
      block.x,
      n_BTD,
      past.append(new),
      memory,
      newest=newest,
      source_kv=block.source_kv,
    )
    return state, y_BTD

  def source_kv(self, encoded_BSD, mask_BS):
    return self.tokens.source_kv(encoded_BSD, mask_BS)

  def seen(self, state):
    """Returns n_BSD, the state vectors' `pre_norm`, and its keys and values."""
    n_BSD = self.states.pre_norm(state[1])
    return n_BSD, self.states.kv(n_BSD)

  def recur(self, state, new: KV, n_BSD, memory: KV):
    """Returns the state after a block.

    Args:
      state: the state before the block.
      new: keys and values of the block's tokens.
      n_BSD, memory: results of `seen` for this state.
    """
    past, s_BSD = state
    kv = past.append(new)
    s_BSD = self.update(s_BSD, n_BSD, memory, kv)
    return kv.last(self.config.window), s_BSD

  def update(self, s_BSD, n_BSD, memory: KV, kv: KV):
    """Returns the state vectors after a block.

    They are unchanged in rows where the whole block is padding. For the
    arguments, see StateVectors.update, which has them in the same order.
    """
    real_B = jnp.any(kv.mask[:, self.config.window :], 1)
    update = state_use.of_real_rows(StateVectors.update, real_B)
    new_BSD = update(self.states, s_BSD, n_BSD, memory, kv)
    return jnp.where(real_B[:, None, None], new_BSD, s_BSD)

  def to_decode_state(self, state):
    past, s_BSD = state
    unread = jax.tree.map(jnp.zeros_like, past)
    filled_B = jnp.zeros(s_BSD.shape[0], jnp.int32)
    _, memory = self.seen(state)
    return BlockDecodeState(past.append(unread), s_BSD, memory, filled_B)

  def decode_step(self, decode_state, block):
    W, filled_B = self.config.window, decode_state.filled_B
    filled = filled_B[0]
    n_B1D = self.tokens.pre_norm(block.x)
    kv = jax.tree.map(
      lambda a, new: jax.lax.dynamic_update_slice_in_dim(a, new, W + filled, 1),
      decode_state.kv,
      self.tokens.kv(n_B1D, block.mask),
    )
    near = jax.tree.map(
      lambda a: jax.lax.dynamic_slice_in_dim(a, filled, W + 1, 1), kv
    )
    y_B1D = self.tokens(
      block.x, n_B1D, near, decode_state.memory, source_kv=block.source_kv
    )
    decode_state = decode_state.replace(kv=kv, filled_B=filled_B + 1)
    return nn.cond(
      filled + 1 == W, self.next_block, lambda _, d: d, self, decode_state
    ), y_B1D

  def next_block(self, decode_state: BlockDecodeState) -> BlockDecodeState:
    """Returns the decode state at the start of the block after a full one.

    Its state vectors are those after the full block.
    """
    s_BSD, kv = decode_state.states_BSD, decode_state.kv
    n_BSD = self.states.pre_norm(s_BSD)
    s_BSD = self.update(s_BSD, n_BSD, decode_state.memory, kv)
    return self.to_decode_state((kv.last(self.config.window), s_BSD))

  def to_segment_state(self, decode_state):
    return (
      jax.tree.map(lambda a: a[:, : self.config.window], decode_state.kv),
      decode_state.states_BSD,
    )


class StateVectors(nn.Module):
  """The S state vectors of a layer, and their update after each block.

  In an update, each state vector attends to all state vectors and to the tokens
  of the previous block and of this one. Gates then combine the result with the
  old state vector. Hutchins et al. 2022 call this update the horizontal
  direction.

  Attributes:
    config: sizes and choices, the same as for tokens.
    slots: number of state vectors S.
    gate: a gate class of gates.py (section 3.3 of the paper).
    gate_config: name of the sequence of operations in an update: 'dual'
      (attention, gate, MLP, gate), 'single' (attention, MLP, gate) or 'skip'
      (attention, gate); see section 3.5 of the paper.
    sequential: whether state vectors first attend to each other and pass
      through a gate, and only then attend to tokens. 'dual' then has three
      gates and 'skip' two. If False, they attend to both at once. Section 3.1
      of the paper reports that a third gate leads to a worse perplexity.
    ids_stddev: standard deviation of the learned IDs in a new model. They are
      added to state vectors that are normalized to 1.
    states_stddev: standard deviation of the learned initial state vectors in a
      new model.
  """

  config: LayerConfig
  slots: int
  gate: Callable[..., nn.Module] = gates.FixedGate
  gate_config: str = 'skip'
  sequential: bool = False
  ids_stddev: float = 1.0
  states_stddev: float = 0.1

  def setup(self):
    if self.slots < 1:
      raise ValueError(
        f'slots must be at least 1, got {self.slots}. Set SLOTS.'
      )
    for name in 'ids_stddev', 'states_stddev':
      if (value := getattr(self, name)) < 0:
        raise ValueError(
          f'{name} must be at least 0, got {value}. Set {name} of the '
          'recurrent layer.'
        )
    # Gates take the place of the sums that post_norm normalizes.
    config = dataclasses.replace(self.config, post_norm=False)
    gate = self.gate
    if config.compat_meliad:
      gate = functools.partial(gate, tanh=self.gate_config == 'single')
    if self.gate_config not in ('dual', 'single', 'skip'):
      raise ValueError(
        f'gate_config must be dual, single or skip, got {self.gate_config!r}.'
        ' Set block_recurrent.BlockRecurrentLayer.gate_config, or '
        'block_feedback.BlockFeedback.gate_config.'
      )
    attention = functools.partial(
      Attention, config, has_memory=True, has_positions=False, join=gate
    )
    self.attention = attention()
    if self.sequential:
      if self.gate_config == 'single':
        raise ValueError(
          "sequential is True, but gate_config 'single' has no gate between "
          'the two kinds of attention. Set gate_config to dual or skip, or '
          'remove block_recurrent.BlockRecurrentLayer.sequential.'
        )
      self.memory_attention = attention()
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
    init = nn.initializers.normal(self.ids_stddev)
    self.ids_SD = self.param('ids', init, shape)
    init = nn.initializers.normal(self.states_stddev)
    self.initial_states_SD = self.param('first', init, shape)

  def initial_states(self, batch: int):
    """Returns the learned initial state vectors, s_BSD float32.

    They are the same in every row.
    """
    shape = batch, *self.initial_states_SD.shape
    return jnp.broadcast_to(self.initial_states_SD, shape)

  def pre_norm(self, s_BSD):
    """Returns n_BSD: the normalized state vectors plus their learned IDs."""
    return self.add_ids(self.attention.pre_norm(s_BSD))

  def add_ids(self, n_BSD):
    return n_BSD + self.ids_SD.astype(n_BSD.dtype)

  def kv(self, n_BSD) -> KV:
    """Returns the state vectors' keys and values, given their `pre_norm`."""
    return self.attention.kv(n_BSD)

  def update(self, s_BSD, n_BSD, kv_states: KV, kv_tokens: KV):
    """Returns the state vectors after a block.

    Args:
      s_BSD: state vectors before the block.
      n_BSD: their `pre_norm`.
      kv_states: keys and values of the state vectors, the result of `kv`.
        Tokens read them too, so they are computed once, outside of this method.
        Computing them twice would cost as much as a gate, since XLA never
        merges the two backward passes.
      kv_tokens: keys and values of the tokens of the previous block and this
        one.
    """
    attention = self.attention
    query = attention.query(n_BSD)
    heads = [attention.attend_slots(*query, kv_states, 'state_to_state')]
    if self.sequential:
      s_BSD = attention.project(s_BSD, *heads)
      attention, heads = self.memory_attention, []
      n_BSD = self.add_ids(attention.pre_norm(s_BSD))
    heads.append(attention.attend_memory(n_BSD, kv_tokens))
    if self.gate_config == 'single':
      # Stacked first, since devices would exchange the heads that they hold to
      # concatenate them. Then flattened, since XLA of jaxlib 0.10 multiplies by
      # a [2, H K, F] kernel wrongly in the backward pass if it is sharded three
      # ways.
      heads = jnp.stack(heads, 2)
      return self.mlp(s_BSD, heads.reshape(*s_BSD.shape[:2], -1))
    s_BSD = attention.project(s_BSD, *heads)
    if self.gate_config == 'skip':
      return s_BSD
    return self.mlp(s_BSD, self.mlp_norm(s_BSD))
