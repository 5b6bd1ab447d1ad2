"""Mazes with colored objects, which an agent must find one after another.

Fan et al. 2020, sections 4.2.2 and 6.1. The paper gives the size, Kruskal's
algorithm, the observation, the actions and the 200 steps; the rest is a choice
of this library.
"""

import dataclasses
import functools

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.reinforcement import environment
from meliad_rec.reinforcement.environment import MOVES_4C

WALL, EMPTY = 0, 1  # An object of color c is 2 + c.
_FORWARD = 0
_TURNS = 0, -1, 1  # Of the actions forward, left and right.


class MazeState(struct.PyTreeNode):
  """State of one episode; all leaves are int32."""

  grid: jax.Array  # [side, side]: WALL, EMPTY or 2 + color.
  place: jax.Array  # Row and column of the agent.
  heading: jax.Array  # Row of MOVES_4C; always 0 if the agent does not turn.
  target: jax.Array  # Color of the object to find.
  action: jax.Array  # The previous action; -1 before the first.
  steps: jax.Array  # Steps taken.


@dataclasses.dataclass(frozen=True)
class Maze:
  """A random maze, in which each object that is asked for must be reached.

  Cells whose row and column are both even are rooms. Kruskal's algorithm opens
  cells between rooms until all are connected. Then each room, in random order,
  that has only one opening gets a second one, so that there is no dead end. The
  outside counts as wall. One object of each color is on a free cell, and the
  agent starts on another free cell, with a random heading.

  The agent observes the 3 x 3 cells around it, each one-hot as wall, empty or
  one of the colors, and the color of the target, one-hot. If it turns, the view
  is rotated so that its heading is up, and the actions are forward, left and
  right; otherwise, the actions are the 4 directions. Moving into a wall only
  costs the step.

  The reward is 1 for moving onto the object of the target color. The next
  target is drawn uniformly from the other colors; objects stay where they are.
  An episode ends after `limit` steps, which count as its end for returns too,
  unless A2C.bootstrap_at_limit.

  Attributes:
    side: rows and columns of the grid, odd.
    colors: number of objects.
    limit: steps of an episode.
    turn: whether the agent has a heading (the paper's Maze). If False, it moves
      in all directions (Maze Easy).
    with_action: whether the agent also observes its previous action, one-hot.
      Without it, an agent cannot know where it turned. None: as `turn`.

  Raises:
    ValueError: side is even or below 3, limit is below 1, or there are fewer
      than 2 colors or more than the maze surely has room for.
  """

  side: int = 9
  colors: int = 8
  limit: int = 200
  turn: bool = True
  with_action: bool | None = None

  endless = True

  def __post_init__(self):
    if self.side < 3 or self.side % 2 == 0:
      raise ValueError(
        f'side must be odd and at least 3, got {self.side}. Set GRID.'
      )
    if self.limit < 1:
      raise ValueError(
        f'limit must be at least 1, got {self.limit}. Set EPISODE_STEPS.'
      )
    rooms = ((self.side + 1) // 2) ** 2
    most = min(2 * rooms - 2, len(environment.PALETTE))
    if not 2 <= self.colors <= most:
      raise ValueError(
        f'colors must be from 2 to {most} in a maze of side {self.side}, got '
        f'{self.colors}. Set COLORS.'
      )

  @property
  def actions(self) -> int:
    return 3 if self.turn else 4

  @property
  def observations(self) -> int:
    seen = self.actions if self._sees_action else 0
    return 9 * (2 + self.colors) + self.colors + seen

  @property
  def _sees_action(self) -> bool:
    return self.turn if self.with_action is None else self.with_action

  def reset(self, key: jax.Array) -> MazeState:
    """Returns the state at the start of an episode."""
    wall_key, place_key, heading_key, target_key = jax.random.split(key, 4)
    free_N = self._free(wall_key).ravel()
    score_N = jax.random.uniform(place_key, free_N.shape) + free_N
    _, cells = jax.lax.top_k(score_N, self.colors + 1)  # Distinct free cells.
    grid_N = jnp.where(free_N, EMPTY, WALL)
    grid_N = grid_N.at[cells[1:]].set(2 + jnp.arange(self.colors))
    heading = jax.random.randint(heading_key, (), 0, 4)
    zero = jnp.zeros((), jnp.int32)
    return MazeState(
      grid=grid_N.reshape(self.side, self.side),
      place=jnp.stack(jnp.divmod(cells[0], self.side)),
      heading=heading if self.turn else zero,
      target=jax.random.randint(target_key, (), 0, self.colors),
      action=zero - 1,
      steps=zero,
    )

  def observe(self, state: MazeState) -> jax.Array:
    """Returns the observation of a state, [observations] float32."""
    view_N = jax.lax.dynamic_slice(
      jnp.pad(state.grid, 1, constant_values=WALL), state.place, (3, 3)
    ).ravel()
    view_N = view_N[jnp.asarray(_rotations())[state.heading]]
    parts = [
      jax.nn.one_hot(view_N, 2 + self.colors).ravel(),
      jax.nn.one_hot(state.target, self.colors),
    ]
    if self._sees_action:
      parts.append(environment.action_seen(state.action, self.actions))
    return jnp.concatenate(parts)

  def step(
    self, key: jax.Array, state: MazeState, action: jax.Array
  ) -> tuple[MazeState, jax.Array, jax.Array]:
    """Returns the state after an action, the reward, and whether it ended."""
    heading, moves, direction = state.heading, True, action
    if self.turn:
      heading = (heading + jnp.array(_TURNS)[action]) % 4
      moves, direction = action == _FORWARD, heading
    aim = state.place + jnp.asarray(MOVES_4C)[direction]
    padded = jnp.pad(state.grid, 1, constant_values=WALL)
    moves &= padded[aim[0] + 1, aim[1] + 1] != WALL
    place = jnp.where(moves, aim, state.place)
    reached = moves & (state.grid[place[0], place[1]] == 2 + state.target)
    another = state.target + jax.random.randint(key, (), 1, self.colors)
    steps = state.steps + 1
    state = state.replace(
      place=place,
      heading=heading,
      target=jnp.where(reached, another % self.colors, state.target),
      action=action.astype(jnp.int32),
      steps=steps,
    )
    return state, reached.astype(jnp.float32), steps >= self.limit

  def picture(self, state: MazeState) -> np.ndarray:
    """Returns a picture: the maze, and in its frame the target's color."""
    shades = [environment.WALL, environment.FLOOR, *environment.PALETTE]
    inner = np.asarray(shades, np.uint8)[state.grid]
    inner[tuple(state.place)] = environment.AGENT
    target = environment.PALETTE[state.target]
    whole = np.tile(target, (self.side + 2, self.side + 2, 1))
    whole[1:-1, 1:-1] = inner
    return whole

  def _free(self, key: jax.Array) -> jax.Array:
    """Returns which cells are free, bool [side, side]."""
    edges, sides = _edges(self.side)
    rooms = len(sides)
    join_key, order_key, open_key = jax.random.split(key, 3)

    def join(carry, edge):
      label_R, open_E = carry
      a, b = label_R[jnp.asarray(edges)[edge, :2]]
      label_R = jnp.where(label_R == b, a, label_R)
      return (label_R, open_E.at[edge].set(a != b)), None

    def widen(open_E, room):
      index, score_4 = room
      edge_4 = jnp.asarray(sides)[index]
      open_4 = (edge_4 >= 0) & open_E[edge_4]
      closed_4 = (edge_4 >= 0) & ~open_4
      edge = edge_4[jnp.argmax(jnp.where(closed_4, score_4, -1.0))]
      return open_E.at[edge].max(open_4.sum() <= 1), None

    order_E = jax.random.permutation(join_key, len(edges))
    start = jnp.arange(rooms), jnp.zeros(len(edges), bool)
    (_, open_E), _ = jax.lax.scan(join, start, order_E)
    order_R = jax.random.permutation(order_key, rooms)
    scores = jax.random.uniform(open_key, (rooms, 4))
    open_E, _ = jax.lax.scan(widen, open_E, (order_R, scores))
    free = np.zeros((self.side, self.side), bool)
    free[::2, ::2] = True
    return jnp.asarray(free).at[edges[:, 2], edges[:, 3]].set(open_E)


@functools.cache
def _edges(side: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the cells between rooms, and which of them each room has.

  Returns:
    For each such cell: its two rooms, its row and its column; and for each
    room the indices of up to 4 such cells, filled up with -1.
  """
  width = (side + 1) // 2
  edges = []
  for row, column in np.ndindex(side, side):
    if (row + column) % 2:
      first = row // 2 * width + column // 2
      second = (row + 1) // 2 * width + (column + 1) // 2
      edges.append((first, second, row, column))
  sides = np.full((width**2, 4), -1)
  for room in range(width**2):
    found = [i for i, edge in enumerate(edges) if room in edge[:2]]
    sides[room, : len(found)] = found
  return np.array(edges), sides


@functools.cache
def _rotations() -> np.ndarray:
  """Returns the order of the cells of a view for each heading, [4, 9]."""
  view = np.arange(9).reshape(3, 3)
  return np.stack([np.rot90(view, heading).ravel() for heading in range(4)])
