"""The corridor, against a plain form of its rules, and what memory is worth."""

import itertools

import jax
import numpy as np
import pytest

from meliad_rec.reinforcement.corridor import Corridor


class Plain:
  """The rules of Corridor, step by step."""

  def __init__(self, color, length):
    self.color, self.length, self.at, self.taken = color, length, 0, 0

  def see(self):
    first = self.at == 0
    return [
      float(first and self.color == 0),
      float(first and self.color == 1),
      float(self.at == self.length),
    ]

  def act(self, action):
    """Returns (reward, whether the episode ended)."""
    self.taken += 1
    if self.at == self.length and action > 0:
      return (1.0 if action == self.color + 1 else -1.0), True
    if action == 0 and self.at < self.length:
      self.at += 1
    return (-1.0, True) if self.taken == 4 * self.length else (0.0, False)


@pytest.mark.parametrize('length', [5, 250])
def test_steps_are_those_of_a_plain_form(length):
  env, episodes, limit = Corridor(length), 100, 4 * length
  world = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), episodes))
  colors = np.asarray(world.color)
  assert 30 < colors.sum() < 70
  keys = jax.random.split(jax.random.key(1), episodes)
  rng = np.random.default_rng(0)
  action_TB = rng.choice(3, (limit, episodes), p=[0.7, 0.15, 0.15])

  @jax.jit
  def play(world):
    def step(world, action_B):
      x_BO = jax.vmap(env.observe)(world)
      world, reward_B, done_B = jax.vmap(env.step)(keys, world, action_B)
      return world, (x_BO, reward_B, done_B)

    return jax.lax.scan(step, world, action_TB)[1]

  x_TBO, reward_TB, done_TB = map(np.asarray, play(world))
  ended = 0
  for b, color in enumerate(colors):
    plain = Plain(color, length)
    for t in range(limit):
      assert x_TBO[t, b].tolist() == plain.see()
      reward, done = plain.act(action_TB[t, b])
      assert (reward_TB[t, b], done_TB[t, b]) == (reward, done)
      if done:
        ended += reward > 0
        break
    assert done
  assert ended  # Some opened the right door.


def test_without_memory_the_mean_return_is_at_most_0():
  """Each policy maps the 4 observations to actions; 1 is best with memory."""
  seen = [(1, 0, 0), (0, 1, 0), (0, 0, 0), (0, 0, 1)]
  means = []
  for actions in itertools.product(range(3), repeat=4):
    policy, total = dict(zip(seen, actions, strict=True)), 0
    for color in 0, 1:
      plain, done = Plain(color, 5), False
      while not done:
        reward, done = plain.act(policy[tuple(plain.see())])
        total += reward
    means.append(total / 2)
  assert max(means) == 0
