"""Acting and learning: returns, gradients, resets, and the splitting law."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs import stack
from meliad_rec.archs.block_recurrent import BlockRecurrentLayer
from meliad_rec.archs.feedback import Feedback
from meliad_rec.archs.lstm import LSTM
from meliad_rec.archs.window import WindowLayer
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import run
from meliad_rec.reinforcement import a2c
from meliad_rec.reinforcement.agent import Agent
from meliad_rec.reinforcement.corridor import Corridor
from meliad_rec.reinforcement.water_maze import WaterMaze

B, T, D, LENGTH = 3, 11, 10, 20
CORRIDOR = Corridor(LENGTH)
CONFIG = LayerConfig(d_model=D, num_heads=2, head_dim=6, mlp_dim=14, window=4)
CELLS = {
  'feedback': lambda: Feedback(config=CONFIG, count=2),
  'window': lambda: stack.layers(2, lambda: WindowLayer(CONFIG)),
  'lstm': lambda: stack.layers(2, lambda: LSTM(D)),
}


@functools.cache
def agent_of(name, env=CORRIDOR):
  """An agent with random parameters, also in the heads, which begin at 0."""
  agent = Agent(CELLS[name](), D, env.actions)
  params = jax.jit(lambda key: a2c.initialize(agent, env, B, key))(
    jax.random.key(0)
  )
  rng = np.random.default_rng(0)
  draw = lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype) / 2
  return agent, jax.tree.map(draw, params)


@functools.cache
def played(name):
  """The agent, its parameters, and what it did from the start of episodes."""
  agent, params = agent_of(name)
  env = Corridor(LENGTH)

  @jax.jit
  def play(params, key):
    acting = a2c.begin(agent, env, params, B, key)
    return a2c.rollout(agent, env, params, acting, T, key)

  return agent, params, play(params, jax.random.key(1))


@pytest.mark.parametrize('name', CELLS)
def test_acting_is_reading_the_recorded_episode_at_once(name):
  agent, params, (_, steps, _) = played(name)
  assert not steps.done.any()  # T steps end no episode of this length.

  def whole(m, x_BTO):
    x_BTD = m.embed(x_BTO)
    block = Block(x_BTD, jnp.ones(x_BTD.shape[:2], bool))
    _, y_BTD = run(m.cell, m.cell.initial_state(B), block)
    y_BTD = m.norm(y_BTD)
    return m.policy(y_BTD), m.value(y_BTD)[..., 0]

  x_BTO = jnp.swapaxes(steps.x, 0, 1)
  logits_BTA, value_BT = agent.apply({'params': params}, x_BTO, method=whole)
  log_BTA = jax.nn.log_softmax(logits_BTA)
  log_BT = jnp.take_along_axis(log_BTA, steps.action.T[..., None], 2)[..., 0]
  np.testing.assert_allclose(steps.log_prob.T, log_BT, atol=1e-5)
  np.testing.assert_allclose(steps.value.T, value_BT, atol=1e-5)
  entropy_BT = -(jnp.exp(log_BTA) * log_BTA).sum(2)
  np.testing.assert_allclose(steps.entropy.T, entropy_BT, atol=1e-5)


@pytest.mark.parametrize('name', CELLS)
def test_an_episode_does_not_depend_on_the_one_before(name):
  agent, params, (acting, steps, _) = played(name)
  variables, x_BO = {'params': params}, steps.x[0] + 1
  start_B = jnp.array([True, False, True])
  fresh = agent.apply(variables, B, method='initial_state')
  _, new_BA, _ = agent.apply(variables, fresh, x_BO, jnp.ones(B, bool))
  _, logits_BA, _ = agent.apply(variables, acting.memory, x_BO, start_B)
  same_B = np.isclose(logits_BA, new_BA, atol=1e-5).all(1)
  np.testing.assert_array_equal(same_B, start_B)


def test_returns_are_those_of_the_definition():
  rng = np.random.default_rng(0)
  reward_TB = rng.normal(size=(T, B)).astype(np.float32)
  done_TB = rng.random((T, B)) < 0.2
  after_TB = rng.normal(size=(T, B)).astype(np.float32)
  last_B, discount = rng.normal(size=B).astype(np.float32), 0.9
  found_TB = a2c.returns(reward_TB, done_TB, after_TB, last_B, discount)
  for t in range(T):
    for b in range(B):
      total, weight = 0.0, 1.0
      for u in range(t, T):
        total += weight * reward_TB[u, b]
        weight *= discount
        if done_TB[u, b]:
          total += weight * after_TB[u, b]
          break
      else:
        total += weight * last_B[b]
      np.testing.assert_allclose(found_TB[t, b], total, rtol=1e-4, atol=1e-5)


def test_gradient_on_a_two_armed_bandit_is_the_analytic_one():
  """Episodes of one step; logits and value are the only parameters."""
  loss = a2c.A2C(discount=0.9, entropy_cost=0.1, value_cost=0.3)
  action_TB = np.array([[0, 1, 1], [1, 1, 0]])
  reward_TB = np.array([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]], np.float32)
  logits_A, value = np.array([0.3, -0.6], np.float32), np.float32(0.7)

  def of(logits_A, value):
    log_A = jax.nn.log_softmax(logits_A)
    whole = jnp.ones(action_TB.shape)
    steps = a2c.Transitions(
      *(None, None, action_TB, log_A[action_TB]),
      entropy=-jnp.sum(jnp.exp(log_A) * log_A) * whole,
      value=value * whole,
      reward=reward_TB,
      done=whole > 0,
      total=reward_TB,
      after=jnp.zeros(action_TB.shape),
    )
    return loss.loss(steps, jnp.full(3, 100.0))  # No step sees this value.

  d_logits_A, d_value = jax.grad(of, (0, 1))(logits_A, value)
  p_A = np.exp(logits_A) / np.exp(logits_A).sum()
  gap_TB = reward_TB - value
  one_hot_TBA = np.eye(2)[action_TB]
  policy_A = -(gap_TB[..., None] * (one_hot_TBA - p_A)).mean((0, 1))
  entropy = -(p_A * np.log(p_A)).sum()
  entropy_A = -p_A * (np.log(p_A) + entropy)
  np.testing.assert_allclose(d_logits_A, policy_A - 0.1 * entropy_A, rtol=1e-5)
  np.testing.assert_allclose(d_value, -2 * 0.3 * gap_TB.mean(), rtol=1e-5)


def test_no_gradient_passes_through_what_values_are_compared_with():
  loss = a2c.A2C(discount=0.9, entropy_cost=0.0, value_cost=0.3)
  rng = np.random.default_rng(0)
  reward_TB = rng.normal(size=(4, 2)).astype(np.float32)
  done_TB = np.arange(8).reshape(4, 2) == 3
  zeros = np.zeros((4, 2), np.float32)

  def of(value, after):
    steps = a2c.Transitions(
      *(None, None, None, zeros, zeros, value + zeros, reward_TB, done_TB),
      *(reward_TB, after * done_TB),
    )
    return loss.loss(steps, value * jnp.ones(2))

  value, after = jnp.float32(0.7), jnp.float32(0.4)
  d_value, d_after = jax.grad(of, (0, 1))(value, after)
  target_TB = a2c.returns(
    reward_TB, done_TB, after * done_TB, value * jnp.ones(2), 0.9
  )
  gap = float((target_TB - value).mean())
  np.testing.assert_allclose(d_value, -2 * 0.3 * gap, rtol=1e-5)
  assert d_after == 0


def test_the_value_at_a_time_limit_is_that_without_the_limit():
  env = WaterMaze(side=3, limit=T)
  agent, params = agent_of('lstm', env)

  def play(limit):
    longer = dataclasses.replace(env, limit=limit)
    acting = a2c.begin(agent, longer, params, B, jax.random.key(1))
    return a2c.rollout(
      *(agent, longer, params, acting, T, jax.random.key(2)), bootstrap=True
    )

  _, steps, _ = play(T)
  _, _, value_B = play(T + 1)
  assert (steps.done.sum(0) == 1).all() and (value_B != 0).all()
  np.testing.assert_allclose(steps.after[-1], value_B, atol=1e-6)
  assert not steps.after[:-1].any()


@pytest.mark.slow
def test_remat_changes_no_gradient():
  env = Corridor(2)
  agent, params = agent_of('feedback')
  acting = a2c.begin(agent, env, params, B, jax.random.key(1))

  def gradient(remat_steps):
    return a2c.gradient(
      *(agent, env, a2c.A2C(remat_steps=remat_steps), params, acting, 12),
      jax.random.key(2),
    )

  plain, remat = (jax.jit(gradient, static_argnums=0)(n) for n in (1, 4))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), plain, remat
  )
  with pytest.raises(ValueError, match='does not divide the 12 steps'):
    jax.eval_shape(lambda: gradient(5))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['feedback', 'window'])
def test_memory_for_a_gradient_hardly_grows_with_the_steps(name):
  """Each step alone would store all keys that the agent recalls."""
  agent, params = agent_of(name)
  acting = a2c.begin(agent, CORRIDOR, params, B, jax.random.key(1))

  def temporary(steps):
    gradient = jax.jit(
      lambda params, key: a2c.gradient(
        *(agent, CORRIDOR, a2c.A2C(remat_steps=10), params, acting, steps), key
      )
    )
    compiled = gradient.lower(params, jax.random.key(2)).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporary(100) < 1.5 * temporary(50)


def test_only_time_limits_are_bootstrapped():
  agent, params = agent_of('lstm')
  acting = a2c.begin(agent, Corridor(2), params, B, jax.random.key(1))
  with pytest.raises(ValueError, match='does not only end at the time limit'):
    a2c.gradient(
      *(agent, Corridor(2), a2c.A2C(bootstrap_at_limit=True), params, acting),
      *(4, jax.random.key(2)),
    )


def test_seeds_in_one_program_are_the_seeds_one_by_one():
  agent, params = agent_of('lstm')
  env = Corridor(2)

  def seeded(key, axis=None):
    acting = a2c.begin(agent, env, params, B, key)
    grads, (_, acting, _) = a2c.gradient(
      agent, env, a2c.A2C(), params, acting, T, key, axis
    )
    return grads, acting

  keys = jax.random.split(jax.random.key(3), 2)
  together = jax.jit(
    jax.vmap(lambda key: seeded(key, 'agents'), axis_name='agents')
  )(keys)
  one = jax.jit(seeded)
  for i in range(2):
    jax.tree.map(
      lambda a, b, i=i: np.testing.assert_allclose(a[i], b, atol=1e-5),
      together,
      one(keys[i]),
    )


def test_a_cell_that_reads_whole_blocks_is_refused():
  cell = BlockRecurrentLayer(CONFIG, slots=3)
  with pytest.raises(ValueError, match='one observation at a time'):
    jax.eval_shape(
      lambda: a2c.initialize(
        Agent(cell, D, 3), Corridor(LENGTH), B, jax.random.key(0)
      )
    )
