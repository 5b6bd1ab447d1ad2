"""The interface of environments: pure functions of one episode."""

from typing import Any
from typing import Protocol

import jax


class Environment(Protocol):
  """An environment whose state is a pytree of arrays of fixed shapes.

  Attributes:
    actions: number of actions.
    observations: entries O of an observation.
  """

  actions: int
  observations: int

  def reset(self, key: jax.Array) -> Any:
    """Returns the state at the start of an episode, drawn with a random key."""

  def observe(self, state: Any) -> jax.Array:
    """Returns what the agent sees of a state, [O] float32."""

  def step(
    self, key: jax.Array, state: Any, action: jax.Array
  ) -> tuple[Any, jax.Array, jax.Array]:
    """Returns the state after an action, the reward, and whether it ended.

    Args:
      key: random key.
      state: state before the action.
      action: int32 below `actions`.
    """
