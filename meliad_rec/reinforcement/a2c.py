"""Advantage actor-critic: acting and learning in one differentiated scan.

Mnih et al. 2016, as Fan et al. 2020 use it. An update lets each of B
environments take T steps, and differentiates through this very scan; nothing is
replayed. Gradients stop at the state from the previous update, as in training
on text. Where the paper is silent, returns are n-step returns up to the end of
the scan, and losses are means over environments and steps.
"""

import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.models.cell import reset
from meliad_rec.models.cell import State
from meliad_rec.reinforcement.agent import Agent
from meliad_rec.reinforcement.environment import Environment


class Acting(struct.PyTreeNode):
  """What is carried from step to step, and from update to update.

  Attributes:
    memory: decode state of the agent's cell.
    world: states of the environments, stacked; leaves [B, ...].
    start_B: bool, True at environments that begin an episode.
    return_B: sum of the rewards of the current episode, not discounted.
    rng: uint32, key data of all later random numbers.
  """

  memory: State
  world: Any
  start_B: jax.Array
  return_B: jax.Array
  rng: jax.Array


class Steps(struct.PyTreeNode):
  """Steps of an agent; all leaves are [T, B]."""

  x: jax.Array  # Observations, [T, B, O].
  start: jax.Array  # bool, whether the step begins an episode.
  action: jax.Array  # int32
  log_prob: jax.Array  # nats, of the action.
  entropy: jax.Array  # nats, of the policy.
  value: jax.Array  # Predicted return from this step on.
  reward: jax.Array
  done: jax.Array  # bool, whether the step ends an episode.
  total: jax.Array  # Return of an episode that ends here, not discounted.


@dataclasses.dataclass(frozen=True)
class A2C:
  """Weights of the losses.

  Attributes:
    discount: weight of the next step's return.
    entropy_cost: weight of the policy's entropy, in nats, which is maximized.
    value_cost: weight of the squared error of the value.
  """

  discount: float = 0.99
  entropy_cost: float = 5e-4
  value_cost: float = 0.5

  def loss(self, steps: Steps, last_value_B: jax.Array) -> jax.Array:
    """Returns the loss, a mean over all steps.

    Args:
      steps: T steps of B environments, as differentiable functions of the
        parameters.
      last_value_B: value of the observation after these steps.
    """
    target_TB = jax.lax.stop_gradient(
      returns(steps.reward, steps.done, last_value_B, self.discount)
    )
    gap_TB = target_TB - steps.value
    policy_TB = -steps.log_prob * jax.lax.stop_gradient(gap_TB)
    return jnp.mean(
      policy_TB
      + self.value_cost * jnp.square(gap_TB)
      - self.entropy_cost * steps.entropy
    )


def returns(reward_TB, done_TB, last_value_B, discount: float) -> jax.Array:
  """Returns the discounted sum of rewards from each step on, [T, B].

  The sum ends with the episode. If the scan ends first, the value of the next
  observation stands for what would follow.
  """

  def before(after_B, step):
    reward_B, done_B = step
    now_B = reward_B + discount * jnp.where(done_B, 0.0, after_B)
    return now_B, now_B

  _, return_TB = jax.lax.scan(
    before, last_value_B, (reward_TB, done_TB), reverse=True
  )
  return return_TB


def begin(
  agent: Agent, env: Environment, params, rows: int, key: jax.Array
) -> Acting:
  """Returns the start of `rows` episodes."""
  key, reset_key = jax.random.split(key)
  memory = agent.apply({'params': params}, rows, method='initial_state')
  return Acting(
    memory=memory,
    world=jax.vmap(env.reset)(jax.random.split(reset_key, rows)),
    start_B=jnp.ones(rows, bool),
    return_B=jnp.zeros(rows),
    rng=jax.random.key_data(key),
  )


def initialize(agent: Agent, env: Environment, rows: int, key: jax.Array):
  """Returns the parameters of a new agent."""

  def once(m):
    x_BO = jnp.zeros((rows, env.observations))
    return m(m.initial_state(rows), x_BO, jnp.ones(rows, bool))

  return agent.init(key, method=once)['params']


def rollout(
  agent: Agent, env: Environment, params, acting: Acting, frames: int
) -> tuple[Acting, Steps, jax.Array]:
  """Lets the agent act for `frames` steps in each environment.

  Args:
    agent: the agent; its actions are drawn from its policy.
    env: an environment that ends its own episodes; the next begins at once.
    params: parameters of the agent.
    acting: what is carried from the steps before.
    frames: number of steps T.

  Returns:
    What is carried on, the steps, and last_value_B, the values of the next
    observations.
  """
  observe = jax.vmap(env.observe)
  variables = {'params': params}

  def step(acting, _):
    B = len(acting.start_B)
    key = jax.random.wrap_key_data(acting.rng)
    key, act_key, step_key, reset_key = jax.random.split(key, 4)
    x_BO = observe(acting.world)
    memory, logits_BA, value_B = agent.apply(
      variables, acting.memory, x_BO, acting.start_B
    )
    action_B = jax.random.categorical(act_key, logits_BA)
    log_BA = jax.nn.log_softmax(logits_BA)
    world, reward_B, done_B = jax.vmap(env.step)(
      jax.random.split(step_key, B), acting.world, action_B
    )
    total_B = acting.return_B + reward_B
    fresh = jax.vmap(env.reset)(jax.random.split(reset_key, B))
    taken = Steps(
      x=x_BO,
      start=acting.start_B,
      action=action_B,
      log_prob=jnp.take_along_axis(log_BA, action_B[:, None], 1)[:, 0],
      entropy=-jnp.sum(jnp.exp(log_BA) * log_BA, 1),
      value=value_B,
      reward=reward_B,
      done=done_B,
      total=total_B,
    )
    next_ = Acting(
      memory=memory,
      world=reset(done_B, fresh, world),
      start_B=done_B,
      return_B=jnp.where(done_B, 0.0, total_B),
      rng=jax.random.key_data(key),
    )
    return next_, taken

  acting, steps = jax.lax.scan(step, acting, length=frames)
  _, _, last_value_B = agent.apply(
    variables, acting.memory, observe(acting.world), acting.start_B
  )
  return acting, steps, last_value_B


def gradient(
  agent: Agent, env: Environment, a2c: A2C, params, acting: Acting, frames: int
):
  """Returns (gradient of the loss, (what is carried on, the steps))."""

  def loss(params):
    after, steps, last_value_B = rollout(
      agent, env, params, jax.lax.stop_gradient(acting), frames
    )
    return a2c.loss(steps, last_value_B), (after, steps)

  return jax.grad(loss, has_aux=True)(params)
