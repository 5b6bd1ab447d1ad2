"""The mazes: their generator, a plain form of their rules, and an oracle."""

import collections
import functools

import jax
import numpy as np
import pytest

from meliad_rec.reinforcement.maze import Maze
from meliad_rec.reinforcement.water_maze import WaterMaze

MOVES = [(-1, 0), (0, 1), (1, 0), (0, -1)]
EPISODES, LIMIT = 40, 60
TINY = {
  'maze': Maze(side=5, colors=3, limit=LIMIT),
  'easy': Maze(side=5, colors=3, limit=LIMIT, turn=False),
  'water': WaterMaze(side=3, limit=LIMIT),
}


def inside(place, side):
  return all(0 <= at < side for at in place)


class PlainMaze:
  """The rules of Maze, from its docstring; the next target is given to it."""

  def __init__(self, env, state):
    self.env, self.grid = env, state.grid
    self.place, self.heading = tuple(state.place), int(state.heading)
    self.target, self.action, self.steps = int(state.target), None, 0

  def cell(self, place):
    return self.grid[place] if inside(place, self.env.side) else 0

  def see(self):
    up, right = MOVES[self.heading], MOVES[(self.heading + 1) % 4]
    seen = []
    for ahead in 1, 0, -1:
      for aside in -1, 0, 1:
        place = tuple(
          p + ahead * u + aside * r
          for p, u, r in zip(self.place, up, right, strict=True)
        )
        seen += np.eye(2 + self.env.colors)[self.cell(place)].tolist()
    seen += np.eye(self.env.colors)[self.target].tolist()
    if self.env.turn:
      seen += [float(self.action == a) for a in range(3)]
    return seen

  def act(self, action, next_target):
    """Returns (reward, whether the episode ended)."""
    self.action, self.steps = action, self.steps + 1
    moves, reward = not self.env.turn or action == 0, 0.0
    if self.env.turn:
      self.heading = (self.heading + (0, 3, 1)[action]) % 4
    step = MOVES[self.heading if self.env.turn else action]
    place = self.place[0] + step[0], self.place[1] + step[1]
    if moves and self.cell(place):
      self.place = place
      if self.grid[place] == 2 + self.target:
        assert next_target != self.target
        self.target, reward = next_target, 1.0
    return reward, self.steps == self.env.limit


class PlainWater:
  """The rules of WaterMaze, from its docstring; it is given new places."""

  def __init__(self, env, state):
    self.side, self.names = env.side, state.names.reshape(env.side, -1)
    self.place, self.goal = tuple(state.place), tuple(state.goal)
    self.action, self.steps, self.limit = None, 0, env.limit
    assert self.place != self.goal

  def see(self):
    eye = np.eye(self.side**2)
    near = [
      (self.place[0] + r, self.place[1] + c) == self.goal
      for r in (-1, 0, 1)
      for c in (-1, 0, 1)
    ]
    return [
      *eye[self.names[self.place]],
      *eye[self.names[self.goal]],
      *map(float, near),
      *(float(self.action == a) for a in range(4)),
    ]

  def act(self, action, next_place):
    """Returns (reward, whether the episode ended)."""
    self.action, self.steps, reward = action, self.steps + 1, 0.0
    step = MOVES[action]
    place = self.place[0] + step[0], self.place[1] + step[1]
    if inside(place, self.side):
      self.place = place
    if self.place == self.goal:
      self.place, reward = tuple(next_place), 1.0
      assert self.place != self.goal
    return reward, self.steps == self.limit


@functools.cache
def recorded(name, episodes=EPISODES, seed=0):
  """Random actions: (states, observations, actions, rewards, ends) [T, B]."""
  env = TINY[name]

  @jax.jit
  def play(key):
    reset_key, step_key, act_key = jax.random.split(key, 3)
    world = jax.vmap(env.reset)(jax.random.split(reset_key, episodes))
    action_TB = jax.random.randint(
      act_key, (env.limit, episodes), 0, env.actions
    )

    def step(world, now):
      action_B, key = now
      keys = jax.random.split(key, episodes)
      new, reward_B, done_B = jax.vmap(env.step)(keys, world, action_B)
      x_BO = jax.vmap(env.observe)(world)
      return new, (world, new, x_BO, action_B, reward_B, done_B)

    keys = jax.random.split(step_key, env.limit)
    return jax.lax.scan(step, world, (action_TB, keys))[1]

  return jax.tree.map(np.asarray, play(jax.random.key(seed)))


@pytest.mark.parametrize('name', TINY)
def test_steps_are_those_of_a_plain_form(name):
  assert_plain(TINY[name], *recorded(name))


@pytest.mark.slow
@pytest.mark.parametrize(
  'env', [Maze(limit=1000), Maze(limit=1000, turn=False), WaterMaze(limit=1000)]
)
def test_long_episodes_are_those_of_a_plain_form(env, monkeypatch):
  """At the paper's size, 1,000 steps of 100 episodes."""
  monkeypatch.setitem(TINY, 'whole', env)
  assert_plain(env, *recorded.__wrapped__('whole', 100))


def assert_plain(env, world, new, x_TBO, action_TB, reward_TB, done_TB):
  assert x_TBO.shape[-1] == env.observations and reward_TB.sum() > 10
  water = isinstance(env, WaterMaze)
  next_TB = new.place if water else new.target
  for b in range(x_TBO.shape[1]):
    state = jax.tree.map(lambda a, b=b: a[0, b], world)
    plain = (PlainWater if water else PlainMaze)(env, state)
    for t in range(env.limit):
      assert x_TBO[t, b].tolist() == plain.see()
      found = plain.act(action_TB[t, b], next_TB[t, b])
      assert found == (reward_TB[t, b], done_TB[t, b])
    assert done_TB[-1, b]


def test_a_turned_world_looks_the_same_to_an_agent_that_turned_with_it():
  """Nor does what is not among the 9 cells around it change what it sees."""
  env = TINY['maze']
  world, _, x_TBO, *_ = recorded('maze')
  state = jax.tree.map(lambda a: a[::7].reshape(-1, *a.shape[2:]), world)
  x_NO = x_TBO[::7].reshape(-1, env.observations)
  observe = jax.jit(jax.vmap(env.observe))
  row_N, column_N = state.place.T
  turned = state.replace(
    grid=np.rot90(state.grid, axes=(1, 2)),  # Counterclockwise.
    place=np.stack([env.side - 1 - column_N, row_N], 1),
    heading=(state.heading - 1) % 4,
  )
  np.testing.assert_array_equal(observe(turned), x_NO)
  only = state.replace(heading=turned.heading)
  assert np.mean(np.any(observe(only) != x_NO, 1)) > 0.9
  row_S, column_S = np.indices((env.side,) * 2).reshape(2, -1)
  far_NS = np.maximum(
    abs(row_S - row_N[:, None]), abs(column_S - column_N[:, None])
  )
  hidden = (far_NS > 1).reshape(state.grid.shape)
  other = np.where(hidden, (state.grid + 1) % 5, state.grid)
  np.testing.assert_array_equal(observe(state.replace(grid=other)), x_NO)


@pytest.mark.slow
def test_targets_and_new_places_are_uniform_over_the_others():
  """All is the same with the same key."""
  world, new, _, _, reward_TB, _ = recorded('easy', 400)
  reached = reward_TB > 0
  step_N = (new.target - world.target)[reached] % 3
  assert np.ptp(np.bincount(step_N)[1:]) < 5 * np.sqrt(reached.sum())
  world, new, _, _, reward_TB, _ = recorded('water', 400)
  reached = reward_TB > 0
  cell = lambda at: at[reached] @ [3, 1]
  counts_GC = np.zeros((9, 9))
  np.add.at(counts_GC, (cell(world.goal), cell(new.place)), 1)
  assert not counts_GC.diagonal().any()
  expected = counts_GC.sum(1, keepdims=True) / 8
  chi = ((counts_GC - expected) ** 2 / expected).sum() - expected.sum()
  assert chi < 63 + 5 * np.sqrt(2 * 63)  # 9 * 7 degrees of freedom.
  again = jax.tree.leaves(recorded.__wrapped__('water', 400))
  for one, other in zip(
    jax.tree.leaves(recorded('water', 400)), again, strict=True
  ):
    np.testing.assert_array_equal(one, other)


@functools.cache
def mazes(turn=True, number=300):
  env = Maze(turn=turn)
  keys = jax.random.split(jax.random.key(7), number)
  return jax.tree.map(np.asarray, jax.jit(jax.vmap(env.reset))(keys))


def test_mazes_are_connected_without_dead_ends():
  """52 of 81 cells are free at least, and 55.3 on average."""
  state = mazes()
  free_B = (state.grid > 0).sum((1, 2))
  assert free_B.min() >= 52 and abs(free_B.mean() - 55.3) < 0.3
  assert sorted({*state.heading.tolist()}) == [0, 1, 2, 3]
  for grid, place in zip(state.grid, state.place, strict=True):
    assert grid[tuple(place)] == 1
    assert sorted(grid[grid > 1]) == [*range(2, 10)]
    padded = np.pad(grid > 0, 1)
    around = sum(np.roll(padded, s, axis) for s in (-1, 1) for axis in (0, 1))
    assert around[1:-1, 1:-1][::2, ::2].min() >= 2
    assert len(distances(grid, tuple(place))) == (grid > 0).sum()


def distances(grid, start, heading=None):
  """{place: steps} from a start; {(place, heading): steps} with a heading."""
  begin = start if heading is None else (start, heading)
  found, queue = {begin: 0}, collections.deque([begin])
  while queue:
    at = queue.popleft()
    place, h = (at, None) if heading is None else at
    ways = range(4) if h is None else [h]
    ahead = [(place[0] + MOVES[w][0], place[1] + MOVES[w][1]) for w in ways]
    ahead = [p for p in ahead if inside(p, len(grid)) and grid[p]]
    if h is not None:
      ahead = [(p, h) for p in ahead]
      ahead += [(place, (h + 1) % 4), (place, (h - 1) % 4)]
    for new in ahead:
      if new not in found:
        found[new] = found[at] + 1
        queue.append(new)
  return found


@pytest.mark.slow
@pytest.mark.parametrize(
  ('turn', 'mean', 'within'), [(True, 17.9, 0.7), (False, 25.7, 1.5)]
)
def test_shortest_ways_give_the_return_of_an_oracle(turn, mean, within):
  """Means of 300 other mazes; 3 standard errors of their difference."""
  state, rng, totals = mazes(turn), np.random.default_rng(0), []
  for b in range(len(state.grid)):
    grid, left, total = state.grid[b], 200, 0
    place, heading = tuple(state.place[b]), int(state.heading[b])
    target = int(state.target[b])
    while True:
      [goal] = map(tuple, np.argwhere(grid == 2 + target))
      found = distances(grid, place, heading if turn else None)
      ends = [(goal, h) for h in range(4)] if turn else [goal]
      steps, end = min((found[e], e) for e in ends if e in found)
      left -= steps
      if left < 0:
        break
      place, heading = end if turn else (end, 0)
      total += 1
      target = (target + rng.integers(1, 8)) % 8
    totals.append(total)
  assert abs(np.mean(totals) - mean) < within


@pytest.mark.slow
@pytest.mark.parametrize(
  ('env', 'mean'),
  [(Maze(), 0.28), (Maze(turn=False), 0.57), (WaterMaze(), 0.38)],
)
def test_return_of_random_actions(env, mean, monkeypatch):
  monkeypatch.setitem(TINY, 'whole', env)
  *_, reward_TB, _ = recorded.__wrapped__('whole', 2000)
  assert abs(reward_TB.sum(0).mean() - mean) < 0.08


@pytest.mark.parametrize('env', [Maze, WaterMaze])
def test_sizes_out_of_range_are_refused(env):
  with pytest.raises(ValueError, match='GRID'):
    env(side=1)
  with pytest.raises(ValueError, match='EPISODE_STEPS'):
    env(limit=0)
