"""The interface of environments: pure functions of one episode."""

from typing import Any
from typing import Protocol
from typing import runtime_checkable

import jax
import numpy as np


@runtime_checkable
class Environment(Protocol):
  """An environment whose state is a pytree of arrays of fixed shapes.

  Its repr must show its settings, as that of a frozen dataclass does. A run can
  be resumed only in an environment with the same repr.

  Attributes:
    actions: number of actions.
    observations: entries O of an observation.
    limit: steps after which an episode ends at the latest.
    endless: whether only `limit` ends an episode.
  """

  actions: int
  observations: int
  endless: bool

  @property
  def limit(self) -> int: ...

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

  def picture(self, state: Any) -> np.ndarray:
    """Returns a picture of a state, RGB as uint8 [rows, columns, 3].

    Each cell of the world is one pixel.

    Args:
      state: state of one episode, as NumPy arrays.
    """


def missing_members(candidate: Any) -> list[str]:
  """Returns the attributes and methods of Environment that an object lacks."""
  members = [*Environment.__annotations__, *vars(Environment)]
  return [
    name
    for name in members
    if not name.startswith('_') and not hasattr(candidate, name)
  ]


# Steps to the cell above, to the right, below and to the left: (row, column).
MOVES_4C = np.array([(-1, 0), (0, 1), (1, 0), (0, -1)])
# Colors of pictures, RGB.
WALL, FLOOR = (130, 130, 130), (235, 235, 235)
AGENT, GOAL = (0, 0, 0), (0, 160, 0)
PALETTE = np.array(
  [
    *((40, 90, 220), (0, 160, 0), (220, 40, 40), (240, 190, 0)),
    *((150, 60, 190), (0, 180, 190), (240, 120, 0), (240, 110, 180)),
  ],
  np.uint8,
)


def action_seen(action: jax.Array, actions: int) -> jax.Array:
  """Returns the previous action, one-hot; zeros before the first (-1)."""
  return jax.nn.one_hot(action, actions)
