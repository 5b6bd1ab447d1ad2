"""A model that reads one token at a time, whatever its cell can do."""

import jax
import jax.numpy as jnp

from meliad_rec.model import Model


class BlockStepper:
  """Steps of a cell that has none: each runs the open block again.

  Exact for every cell, at the cost of a block per token.
  """

  def __init__(self, model: Model):
    self.model = model
    self.block = model.cell.block_length

  def open(self, variables, state, rows):
    return state, jnp.zeros((rows, self.block), jnp.int32), jnp.int32(0)

  def step(self, variables, opened, tokens_B):
    state, tokens_BW, filled = opened
    tokens_BW = tokens_BW.at[:, filled].set(tokens_B)
    B, W = tokens_BW.shape
    seen_BW = jnp.broadcast_to(jnp.arange(W) <= filled, (B, W))
    after, logits_BWV = self.model.apply(
      variables, state, tokens_BW, jnp.zeros(B, bool), seen_BW
    )
    full = filled + 1 == W
    state = jax.tree.map(
      lambda new, old: jnp.where(full, new, old), after, state
    )
    tokens_BW = jnp.where(full, 0, tokens_BW)
    opened = state, tokens_BW, jnp.where(full, 0, filled + 1)
    return opened, logits_BWV[:, filled]

  def close(self, variables, opened):
    return opened[0]


class TokenStepper:
  """Steps of a cell that streams."""

  def __init__(self, model: Model):
    self.model = model

  def open(self, variables, state, rows):
    return self.model.apply(variables, state, method='open')

  def step(self, variables, opened, tokens_B):
    return self.model.apply(variables, opened, tokens_B, method='step')

  def close(self, variables, opened):
    return self.model.apply(variables, opened, method='close')
