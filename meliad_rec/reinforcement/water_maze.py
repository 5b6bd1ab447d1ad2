"""The water maze: a hidden goal, and cells that are known by random names.

Fan et al. 2020, section 6.1, after Morris 1981. The paper gives
the size, the names of the cells, the reward and the 200 steps; the rest is a
choice of this library.
"""

import dataclasses

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.reinforcement import environment
from meliad_rec.reinforcement.environment import MOVES_4C


class WaterMazeState(struct.PyTreeNode):
  """State of one episode; all leaves are int32."""

  names: jax.Array  # [side * side], the name of each cell.
  place: jax.Array  # Row and column of the agent.
  goal: jax.Array  # Row and column of the goal.
  action: jax.Array  # The previous action; -1 before the first.
  steps: jax.Array  # Steps taken.


@dataclasses.dataclass(frozen=True)
class WaterMaze:
  """An open square, in which a goal must be found again and again.

  A random permutation gives each cell a name. The goal and the names stay the
  same during an episode. The agent starts on a random cell other than the goal.

  It observes the name of its cell and the name of the goal's cell, both
  one-hot. If the goal is among the 3 x 3 cells around the agent, it also
  observes where, one-hot, otherwise zeros. The actions are the 4 directions; a
  move into the border only costs the step.

  The reward is 1 for moving onto the goal, and the agent is then moved to a
  random cell other than the goal. An episode ends after `limit` steps, which
  count as its end for returns too, unless A2C.bootstrap_at_limit.

  Attributes:
    side: rows and columns.
    limit: steps of an episode.
    with_action: whether the agent also observes its previous action, one-hot.

  Raises:
    ValueError: side is below 2, or limit below 1.
  """

  side: int = 15
  limit: int = 200
  with_action: bool = True

  actions, endless = 4, True

  def __post_init__(self):
    if self.side < 2:
      raise ValueError(f'side must be at least 2, got {self.side}. Set GRID.')
    if self.limit < 1:
      raise ValueError(
        f'limit must be at least 1, got {self.limit}. Set EPISODE_STEPS.'
      )

  @property
  def observations(self) -> int:
    return 2 * self.side**2 + 9 + self.actions * self.with_action

  def reset(self, key: jax.Array) -> WaterMazeState:
    """Returns the state at the start of an episode."""
    names_key, goal_key, place_key = jax.random.split(key, 3)
    goal = jax.random.randint(goal_key, (), 0, self.side**2)
    zero = jnp.zeros((), jnp.int32)
    return WaterMazeState(
      names=jax.random.permutation(names_key, self.side**2).astype(jnp.int32),
      place=self._elsewhere(place_key, goal),
      goal=jnp.stack(jnp.divmod(goal, self.side)),
      action=zero - 1,
      steps=zero,
    )

  def observe(self, state: WaterMazeState) -> jax.Array:
    """Returns the observation of a state, [observations] float32."""
    name = lambda at: state.names[at[0] * self.side + at[1]]
    row, column = state.goal - state.place
    is_near = (jnp.abs(row) <= 1) & (jnp.abs(column) <= 1)
    parts = [
      jax.nn.one_hot(name(state.place), self.side**2),
      jax.nn.one_hot(name(state.goal), self.side**2),
      jax.nn.one_hot(3 * (row + 1) + column + 1, 9) * is_near,
    ]
    if self.with_action:
      parts.append(environment.action_seen(state.action, self.actions))
    return jnp.concatenate(parts)

  def step(
    self, key: jax.Array, state: WaterMazeState, action: jax.Array
  ) -> tuple[WaterMazeState, jax.Array, jax.Array]:
    """Returns the state after an action, the reward, and whether it ended."""
    aim = state.place + jnp.asarray(MOVES_4C)[action]
    aim = jnp.clip(aim, 0, self.side - 1)
    reached = (aim == state.goal).all()
    goal = state.goal[0] * self.side + state.goal[1]
    steps = state.steps + 1
    state = state.replace(
      place=jnp.where(reached, self._elsewhere(key, goal), aim),
      action=action.astype(jnp.int32),
      steps=steps,
    )
    return state, reached.astype(jnp.float32), steps >= self.limit

  def picture(self, state: WaterMazeState) -> np.ndarray:
    """Returns a picture of the agent and the goal."""
    whole = np.tile(np.uint8(environment.FLOOR), (self.side, self.side, 1))
    whole[tuple(state.goal)] = environment.GOAL
    whole[tuple(state.place)] = environment.AGENT
    return whole

  def _elsewhere(self, key: jax.Array, goal: jax.Array) -> jax.Array:
    """Returns row and column of a random cell other than the goal.

    Args:
      key: random key.
      goal: index of the goal's cell.
    """
    cell = jax.random.randint(key, (), 0, self.side**2 - 1)
    return jnp.stack(jnp.divmod(cell + (cell >= goal), self.side))
