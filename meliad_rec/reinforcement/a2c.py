"""Advantage actor-critic: acting and learning in one differentiated scan.

Mnih et al. 2016, as Fan et al. 2020 use it. An update lets each of B
environments take T steps, and differentiates through this very scan; nothing is
replayed. Gradients stop at the state from the previous update, as in training
on text. Where the paper is silent, returns are n-step returns up to the end of
the scan, and losses are means over environments and steps.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.models.cell import reset
from meliad_rec.models.cell import State
from meliad_rec.reinforcement.agent import Agent
from meliad_rec.reinforcement.environment import Environment

# Settings in gin that set parameters of A2C.
_MACROS = {
  'discount': 'DISCOUNT',
  'entropy_cost': 'ENTROPY_COST',
  'agents': 'AGENTS',
  'remat_steps': 'REMAT_STEPS',
}


class Acting(struct.PyTreeNode):
  """State carried from step to step, and from update to update.

  Attributes:
    memory: decode state of the agent's cell.
    world: states of the environments, stacked; leaves [B, ...].
    start_B: bool, True at environments that begin an episode.
    return_B: sum of the rewards of the current episode, not discounted.
  """

  memory: State
  world: Any
  start_B: jax.Array
  return_B: jax.Array


class Transitions(struct.PyTreeNode):
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
  after: jax.Array  # Return that would follow this step; 0 except at a limit.


@dataclasses.dataclass(frozen=True)
class A2C:
  """Settings of advantage actor-critic.

  Attributes:
    discount: weight of the next step's return.
    entropy_cost: weight of the policy's entropy, in nats, which is maximized.
    value_cost: weight of the squared error of the value.
    agents: number of agents that one program trains, each with its own
      parameters, environments and random numbers.
    bootstrap_at_limit: whether the value of the observation after the last step
      stands for what would follow if the episode had no time limit (Pardo et
      al. 2018). If False, nothing follows.
    remat_steps: the backward pass stores what a cell carries only once in so
      many steps, and computes the steps between again. 1 stores it at each
      step.

  Raises:
    ValueError: discount is not between 0 and 1, a weight is below 0, or agents
      or remat_steps below 1.
  """

  discount: float = 0.99
  entropy_cost: float = 5e-4
  value_cost: float = 0.5
  agents: int = 1
  bootstrap_at_limit: bool = False
  remat_steps: int = 1

  def __post_init__(self):
    for name, least, most in (
      *(('discount', 0, 1), ('entropy_cost', 0, math.inf)),
      *(('value_cost', 0, math.inf), ('agents', 1, math.inf)),
      ('remat_steps', 1, math.inf),
    ):
      value = getattr(self, name)
      if not least <= value <= most:
        raise ValueError(
          f'{name} must be at least {least}'
          f'{f" and at most {most}" if most < math.inf else ""}, got {value}. '
          f'Set {_MACROS.get(name, f"a2c.A2C.{name}")}.'
        )

  def loss(self, steps: Transitions, last_value_B: jax.Array) -> jax.Array:
    """Returns the loss, a mean over all steps.

    Args:
      steps: T steps of B environments, as differentiable functions of the
        parameters.
      last_value_B: value of the observation after these steps.
    """
    target_TB = jax.lax.stop_gradient(
      returns(
        steps.reward, steps.done, steps.after, last_value_B, self.discount
      )
    )
    gap_TB = target_TB - steps.value
    policy_TB = -steps.log_prob * jax.lax.stop_gradient(gap_TB)
    return jnp.mean(
      policy_TB
      + self.value_cost * jnp.square(gap_TB)
      - self.entropy_cost * steps.entropy
    )


def returns(
  reward_TB, done_TB, after_TB, last_value_B, discount: float
) -> jax.Array:
  """Returns the discounted sum of rewards from each step on, [T, B].

  The sum ends with the episode, whose last step has what follows in after_TB.
  If the scan ends first, the value of the next observation stands for what
  would follow.
  """

  def before(next_B, step):
    reward_B, done_B, after_B = step
    now_B = reward_B + discount * jnp.where(done_B, after_B, next_B)
    return now_B, now_B

  _, return_TB = jax.lax.scan(
    before, last_value_B, (reward_TB, done_TB, after_TB), reverse=True
  )
  return return_TB


def begin(
  agent: Agent, env: Environment, params, rows: int, key: jax.Array
) -> Acting:
  """Returns the start of `rows` episodes."""
  return Acting(
    memory=agent.apply({'params': params}, rows, method='initial_state'),
    world=jax.vmap(env.reset)(jax.random.split(key, rows)),
    start_B=jnp.ones(rows, bool),
    return_B=jnp.zeros(rows),
  )


def initialize(agent: Agent, env: Environment, rows: int, key: jax.Array):
  """Returns the parameters of a new agent."""

  def once(m):
    x_BO = jnp.zeros((rows, env.observations))
    return m(m.initial_state(rows), x_BO, jnp.ones(rows, bool))

  return agent.init(key, method=once)['params']


def act(
  agent: Agent,
  env: Environment,
  params,
  acting: Acting,
  key: jax.Array,
  choose: Callable = jax.random.categorical,
  axis: str | None = None,
  bootstrap: bool = False,
) -> tuple[Acting, Transitions]:
  """Lets the agent take one step in each environment.

  Args:
    agent: the agent.
    env: an environment that ends its own episodes; the next begins at once.
    params: parameters of the agent.
    acting: what is carried from the steps before.
    key: random key.
    choose: (key, logits_BA) -> action_B.
    axis: name of the axis of jax.vmap over agents; None: there is one agent.
    bootstrap: A2C.bootstrap_at_limit.

  Returns:
    What is carried on, and the step; its leaves are [B].
  """
  B = len(acting.start_B)
  act_key, step_key, reset_key = jax.random.split(key, 3)
  x_BO = jax.vmap(env.observe)(acting.world)
  memory, logits_BA, value_B = agent.apply(
    {'params': params}, acting.memory, x_BO, acting.start_B
  )
  action_B = choose(act_key, logits_BA)
  log_BA = jax.nn.log_softmax(logits_BA)
  world, reward_B, done_B = jax.vmap(env.step)(
    jax.random.split(step_key, B), acting.world, action_B
  )
  total_B = acting.return_B + reward_B

  def renewed():
    fresh = jax.vmap(env.reset)(jax.random.split(reset_key, B))
    return reset(done_B, fresh, world)

  some = done_B.any()
  if axis is not None:  # `cond` needs one predicate for all agents.
    some = jax.lax.pmax(some, axis)

  def beyond():
    x_BO = jax.vmap(env.observe)(world)
    _, _, value_B = agent.apply(
      {'params': params}, memory, x_BO, jnp.zeros(B, bool)
    )
    return jnp.where(done_B, value_B, 0.0)

  nothing = lambda: jnp.zeros(B)
  next_ = Acting(
    memory=memory,
    # A new maze costs more than a step, and is rarely needed.
    world=jax.lax.cond(some, renewed, lambda: world),
    start_B=done_B,
    return_B=jnp.where(done_B, 0.0, total_B),
  )
  return next_, Transitions(
    x=x_BO,
    start=acting.start_B,
    action=action_B,
    log_prob=jnp.take_along_axis(log_BA, action_B[:, None], 1)[:, 0],
    entropy=-jnp.sum(jnp.exp(log_BA) * log_BA, 1),
    value=value_B,
    reward=reward_B,
    done=done_B,
    total=total_B,
    after=jax.lax.cond(some, beyond, nothing) if bootstrap else nothing(),
  )


def rollout(
  agent: Agent,
  env: Environment,
  params,
  acting: Acting,
  frames: int,
  key: jax.Array,
  axis: str | None = None,
  bootstrap: bool = False,
  remat_steps: int = 1,
) -> tuple[Acting, Transitions, jax.Array]:
  """Lets the agent act for `frames` steps in each environment.

  Args:
    agent, env, params, acting, axis, bootstrap: as in `act`.
    frames: number of steps T.
    key: random key.
    remat_steps: A2C.remat_steps.

  Returns:
    What is carried on, the steps, and last_value_B, the values of the next
    observations.

  Raises:
    ValueError: frames is not a multiple of remat_steps.
  """
  if frames % remat_steps:
    raise ValueError(
      f'remat_steps is {remat_steps}, which does not divide the {frames} steps '
      'of an update. Set REMAT_STEPS or SEGMENT.'
    )

  def step(acting, key):
    return act(agent, env, params, acting, key, axis=axis, bootstrap=bootstrap)

  def several(acting, keys):
    return jax.lax.scan(step, acting, keys)

  keys = jax.random.split(key, frames)
  if remat_steps == 1:
    acting, steps = several(acting, keys)
  else:
    acting, steps = jax.lax.scan(
      jax.checkpoint(several, prevent_cse=False),
      acting,
      keys.reshape(-1, remat_steps),
    )
    steps = jax.tree.map(lambda a: a.reshape(frames, *a.shape[2:]), steps)
  _, _, last_value_B = agent.apply(
    {'params': params},
    acting.memory,
    jax.vmap(env.observe)(acting.world),
    acting.start_B,
  )
  return acting, steps, last_value_B


def gradient(
  agent: Agent,
  env: Environment,
  a2c: A2C,
  params,
  acting: Acting,
  frames: int,
  key: jax.Array,
  axis: str | None = None,
):
  """Returns (gradient, (loss, what is carried on, the steps)).

  Raises:
    ValueError: the steps of an update do not fit `a2c.remat_steps`, or a time
      limit is not the only end of an episode and `a2c.bootstrap_at_limit`.
  """
  if a2c.bootstrap_at_limit and not env.endless:
    raise ValueError(
      f'bootstrap_at_limit is True, but in {env!r} an episode does not only '
      'end at the time limit. Remove a2c.A2C.bootstrap_at_limit.'
    )

  def loss(params):
    after, steps, last_value_B = rollout(
      *(agent, env, params, jax.lax.stop_gradient(acting), frames, key, axis),
      bootstrap=a2c.bootstrap_at_limit,
      remat_steps=a2c.remat_steps,
    )
    value = a2c.loss(steps, last_value_B)
    return value, (value, after, steps)

  return jax.grad(loss, has_aux=True)(params)
