"""The corridor: the color at its start says which door at its end is right.

Figure 3 of Fan et al. 2020. The paper leaves the length, the actions and the
end of an episode open; the values here are choices of this library.
"""

import dataclasses

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.reinforcement import environment

FORWARD = 0  # The actions 1 and 2 open the doors of the two colors.


class CorridorState(struct.PyTreeNode):
  """State of one episode; all leaves are int32 scalars."""

  cell: jax.Array  # 0 at the start, `length` at the doors.
  color: jax.Array  # 0 or 1.
  steps: jax.Array  # Steps taken.


@dataclasses.dataclass(frozen=True)
class Corridor:
  """An environment with an object to remember until the end of a corridor.

  An agent walks from cell 0 to cell `length`, where there are two doors. It
  observes the color of the object at cell 0, one-hot and only in that cell, and
  whether it is at the doors. The actions are: forward, door 0 and door 1. A
  door action before the end does nothing, and neither does forward at the end.

  The reward is 1 for the door of the object's color, and -1 for the other door.
  Either ends the episode. So does step 4 * length, which is worth -1 if no door
  was opened; otherwise an agent without memory could wait at the object of one
  color, and go to the door only for the other one.

  Attributes:
    length: steps from the start to the doors.

  Raises:
    ValueError: length is below 1.
  """

  length: int = 20

  actions, observations, endless = 3, 3, False

  def __post_init__(self):
    if self.length < 1:
      raise ValueError(
        f'length must be at least 1, got {self.length}. Set LENGTH.'
      )

  @property
  def limit(self) -> int:
    return 4 * self.length

  def reset(self, key: jax.Array) -> CorridorState:
    """Returns the state at the start of an episode."""
    zero = jnp.zeros((), jnp.int32)
    return CorridorState(zero, jax.random.randint(key, (), 0, 2), zero)

  def observe(self, state: CorridorState) -> jax.Array:
    """Returns the observation of a state, [3] float32."""
    color = jax.nn.one_hot(state.color, 2) * (state.cell == 0)
    return jnp.append(color, (state.cell == self.length).astype(jnp.float32))

  def step(
    self, key: jax.Array, state: CorridorState, action: jax.Array
  ) -> tuple[CorridorState, jax.Array, jax.Array]:
    """Returns the state after an action, the reward, and whether it ended.

    Args:
      key: random key; not used.
      state: state before the action.
      action: int32 below `actions`.
    """
    del key
    opens = (state.cell == self.length) & (action != FORWARD)
    is_right = action - 1 == state.color
    steps = state.steps + 1
    late = ~opens & (steps >= self.limit)
    reward = jnp.where(opens, jnp.where(is_right, 1.0, -1.0), -1.0 * late)
    walks = (action == FORWARD) & (state.cell < self.length)
    state = state.replace(cell=state.cell + walks, steps=steps)
    return state, reward, opens | late

  def picture(self, state: CorridorState) -> np.ndarray:
    """Returns a picture: the agent below the object, the way and the doors."""
    whole = np.tile(np.uint8(environment.FLOOR), (2, self.length + 2, 1))
    whole[0, 0] = environment.PALETTE[state.color]
    whole[0, 1:-1] = environment.WALL
    whole[:, -1] = environment.PALETTE[:2]
    whole[1, state.cell] = environment.AGENT
    return whole
