"""An agent: observations in, action logits and a value out; a cell remembers.

Letters of this file: O entries of an observation, A actions.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from meliad_rec.layers.norms import RMSNorm
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import reset
from meliad_rec.models.cell import State


class Agent(nn.Module):
  """Embedding of observations, cell, norm, and heads for policy and value.

  Attributes:
    cell: the architecture. It must read any number of tokens, also one by one.
    d_model: width D.
    actions: number of actions A.
    final_norm: a class from norms.py, for outputs of the cell.
    dtype: dtype of activations; logits and values are float32.
  """

  cell: Cell
  d_model: int
  actions: int
  final_norm: type[nn.Module] = RMSNorm
  dtype: str = 'float32'

  def setup(self):
    if self.cell.block_length is not None or not self.cell.can_step:
      raise ValueError(
        'This architecture reads whole blocks or documents, but an agent reads '
        'one observation at a time. Choose arch/feedback, window, lstm or '
        'repeated.'
      )
    self.embed = nn.Dense(self.d_model, dtype=self.dtype)
    self.norm = self.final_norm(dtype=self.dtype)
    self.policy = nn.Dense(self.actions, kernel_init=nn.initializers.zeros)
    self.value = nn.Dense(1, kernel_init=nn.initializers.zeros)

  def initial_state(self, batch: int) -> State:
    """Returns the decode state at the start of `batch` episodes."""
    return self.cell.to_decode_state(self.cell.initial_state(batch))

  def __call__(self, state: State, x_BO: jax.Array, start_B: jax.Array):
    """Reads one observation of each row.

    Args:
      state: decode state of the cell before this observation.
      x_BO: observations.
      start_B: bool, True at rows that begin an episode; their state is reset.

    Returns:
      The new state, logits_BA float32 of the actions, and value_B float32.
    """
    B = len(start_B)
    state = reset(start_B, self.initial_state(B), state)
    block = Block(self.embed(x_BO)[:, None], jnp.ones((B, 1), bool))
    state, y_B1D = self.cell.decode_step(state, block)
    y_BD = self.norm(y_B1D[:, 0]).astype(jnp.float32)
    return state, self.policy(y_BD), self.value(y_BD)[:, 0]
