"""The compiled training step of agents: they act for a segment, and learn."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax.interpreters import partial_eval
import jax.numpy as jnp
import optax

from meliad_rec.distributed import weight_update
from meliad_rec.metrics.metrics import MeanMetric
from meliad_rec.metrics.metrics import Sums
from meliad_rec.models.cell import Block
from meliad_rec.models.model import Model
from meliad_rec.reinforcement import a2c
from meliad_rec.reinforcement.a2c import A2C
from meliad_rec.reinforcement.a2c import Acting
from meliad_rec.reinforcement.agent import Agent
from meliad_rec.reinforcement.environment import Environment
from meliad_rec.training.program import TrainProgram
from meliad_rec.training.train_step import TrainState

# Batches of agents are empty: their data come from the environments.
EMPTY: Any = ()
_AXIS = 'agents'
# Fields of a Model that agents lack, with macros that set them.
_NOT_OF_AGENTS = {
  'dropout': ' (set DROPOUT = 0.0)',
  'embedding_dropout': '',
  'embedding': '',
  'logits_divisor': '',
  'clear_state': '',
  'head': '',
  'encoder': '',
  'encoder_norm': '',
}
# Axis of the agents in each part of the state. Rows of the carry come first.
_STATE = TrainState(step=None, params=0, opt_state=0, carry=1, ema=0, rng=0)


@dataclasses.dataclass(frozen=True)
class AgentProgram(TrainProgram):
  """Agents, their environments and their optimizer on a mesh of devices.

  A training step is `segment` steps of each agent in each of its `rows`
  environments. The carry is an a2c.Acting. If there are several agents, each
  leaf of the state except `step` has an axis of agents: the first one, or the
  second one in the carry.

  Attributes:
    model: the cell and width of the agents.
    env: the environment.
    objective: how the agents learn, an A2C.
  """

  env: Environment = dataclasses.field(kw_only=True)
  objective: A2C  # type: ignore[assignment]

  @property
  def places(self) -> int:
    return super().places * self.objective.agents

  @functools.cached_property
  def agent(self) -> Agent:
    """The agent that acts; ValueError if the model does not fit."""
    return agent_of(self.model, self.env)

  def batch_shapes(self, rows: int):
    """Returns (): agents read no batches, but act in their environment."""
    del rows
    return EMPTY

  def empty_batch(self, rows: int):
    """Returns (): agents read no batches, but act in their environment."""
    del rows
    return EMPTY

  def put(self, batch, rows: int):
    """Returns (): agents read no batches, but act in their environment."""
    del batch, rows
    return EMPTY

  def empty_carry(self, params, rows: int) -> Acting:
    """Returns the start of episodes, the same in each call."""
    return self._begin(params, rows=rows)

  @functools.cached_property
  def eval_step(self) -> Callable:
    """Compiled function (params, carry, batch) -> (carry, Sums, None).

    The agents take one step, and the loss is the sum of their outputs.
    """

    def step(params, carry):
      key = jax.random.key(0)
      carry, steps = a2c.act(
        self.agent, self.env, params, carry, key, axis=self._axis
      )
      outputs = (steps.log_prob + steps.value).sum()
      return carry, _sums(steps, outputs)

    with jax.set_mesh(self.mesh):
      compiled = jax.jit(self.over_agents(step, (0, 1), (1, 0)))

    def one(params, carry, batch):
      del batch
      with jax.set_mesh(self.mesh):
        carry, sums = compiled(params, carry)
      return carry, self._together(sums), None

    return one

  def forward(self, params, carry, batch):
    """Returns what the agents do in a segment, for counts of FLOPs."""
    del batch

    def act(params, carry):
      return a2c.rollout(
        *(self.agent, self.env, params, carry, self.segment),
        key=jax.random.key(0),
        axis=self._axis,
      )

    return self.over_agents(act, (0, 1), 0)(params, carry)

  def over_agents(self, function: Callable, in_axes, out_axes) -> Callable:
    """Maps a function of one agent over all agents, if there are several."""
    if self._axis is None:
      return function
    return jax.vmap(function, in_axes, out_axes, axis_name=self._axis)

  def each(self, seed) -> jax.Array:
    """Returns the seed of each agent, [agents], or of the only one, [].

    Runs with as many agents and different seeds share no agent.
    """
    agents = self.objective.agents
    if agents == 1:
      return seed
    return jnp.uint32(agents) * seed + jnp.arange(agents, dtype=jnp.uint32)

  @property
  def _axis(self) -> str | None:
    return _AXIS if self.objective.agents > 1 else None

  @functools.cached_property
  def _begin(self) -> Callable:
    def begin(params, rows):
      one = lambda params, seed: a2c.begin(
        self.agent, self.env, params, rows, jax.random.key(seed)
      )
      return self.over_agents(one, (0, 0), 1)(params, self.each(0))

    jitted = jax.jit(begin, static_argnames='rows')

    def on_mesh(params, rows):
      with jax.set_mesh(self.mesh):
        return jitted(params, rows=rows)

    return on_mesh

  @functools.cached_property
  def _create_state(self) -> Callable:
    def create(seed):
      init_key, begin_key, key = jax.random.split(jax.random.key(seed), 3)
      params = a2c.initialize(self.agent, self.env, 1, init_key)
      return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=self.optimizer.init(params),
        carry=a2c.begin(self.agent, self.env, params, self.rows, begin_key),
        ema=None if self.ema_decay is None else jax.tree.map(jnp.copy, params),
        rng=jax.random.key_data(key),
      )

    def of_all(seed):
      return self.over_agents(create, 0, _STATE)(self.each(seed))

    return of_all

  @functools.cached_property
  def _step(self) -> Callable:
    def step(state, batch):
      del batch
      both = self.over_agents(self._update, (_STATE,), (_STATE, 0))
      state, sums = both(state)
      return state, self._together(sums)

    return step

  def _update(self, state: TrainState) -> tuple[TrainState, Sums]:
    """Returns the state of one agent after a step, and the Sums of the step."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
    grads, (loss, carry, steps) = a2c.gradient(
      *(self.agent, self.env, self.objective, state.params, state.carry),
      *(self.segment, key, self._axis),
    )
    with jax.named_scope('optimizer'):
      grads = weight_update.scatter_gradients(grads)
      sums = _sums(steps, loss * steps.done.size).replace(
        gradient_norm=optax.global_norm(grads)
      )
      state = state.updated(
        grads, self.optimizer, sums.tokens, carry, self.ema_decay
      )
    return state, sums

  def _together(self, sums: Sums) -> Sums:
    """Returns the Sums of all agents, and the return of each."""
    if self._axis is None:
      return sums
    own = {
      f'mean_return_{i}': jax.tree.map(
        lambda a, i=i: a[i], sums.sown['mean_return']
      )
      for i in range(self.objective.agents)
    }
    whole = jax.tree.map(lambda a: a.sum(0), sums)
    return whole.replace(
      gradient_norm=sums.gradient_norm.mean(),
      steps=jnp.ones((), jnp.int32),
      sown=whole.sown | own,
    )


def agent_of(model: Model, env: Environment) -> Agent:
  """Returns an agent with the cell and the width of a model.

  Raises:
    ValueError: the model has a part that agents lack.
  """
  for field in dataclasses.fields(Model):
    value = getattr(model, field.name)
    if field.name in _NOT_OF_AGENTS and value != field.default:
      raise ValueError(
        f'model.Model.{field.name} is {value!r}, but an agent has no such '
        f'part. Remove it{_NOT_OF_AGENTS[field.name]}.'
      )
  agent = Agent(
    model.cell, model.d_model, env.actions, model.final_norm, model.dtype
  )
  _check_training(agent, env)
  return agent


def _check_training(agent: Agent, env: Environment) -> None:
  """Raises ValueError if the cell has dropout or losses, which agents lack."""
  key = jax.eval_shape(jax.random.key, 0)
  params = jax.eval_shape(lambda key: a2c.initialize(agent, env, 1, key), key)

  def act(key, params):
    once = lambda m, x_BO: m(m.initial_state(1), x_BO, jnp.ones(1, bool))
    x_BO, rngs = jnp.zeros((1, env.observations)), {'dropout': key}
    return agent.apply({'params': params}, x_BO, rngs=rngs, method=once)

  trace = jax.make_jaxpr(act)(key, params).jaxpr
  _, used = partial_eval.dce_jaxpr(trace, [True] * len(trace.outvars))
  if used[0]:
    raise ValueError(
      'The cell has dropout, but agents do not use it. Set DROPOUT and '
      'LAYER_DROP to 0, and remove options/layer/dropout_inside.'
    )

  def read(params):
    x_BTD = jnp.zeros((1, 1, agent.d_model), agent.dtype)
    block = Block(x_BTD, jnp.ones((1, 1), bool))
    once = lambda m: m.cell(m.cell.initial_state(1), block)
    return agent.apply({'params': params}, mutable=['losses'], method=once)[1]

  if jax.eval_shape(read, params):
    raise ValueError(
      'The cell has a loss of its own, which agents do not minimize. Remove '
      'the option that adds it, such as options/layer/adaptive_span.'
    )


def _sums(steps: a2c.Transitions, loss: jax.Array) -> Sums:
  """Returns the Sums of an agent's steps, of which none is scored.

  Args:
    steps: steps of the agent.
    loss: loss, summed over the steps.
  """
  count = steps.done.sum(dtype=jnp.float32)
  of_episodes = lambda a: MeanMetric(jnp.sum(a * steps.done), count)
  size = jnp.float32(steps.done.size)
  none = jnp.zeros((), jnp.int32)
  return Sums(
    nats=loss.astype(jnp.float32),
    correct=none,
    tokens=jnp.int32(steps.done.size),
    scored=none,
    padding=none,
    gradient_norm=jnp.zeros(()),
    steps=jnp.ones((), jnp.int32),
    sown={
      'mean_return': of_episodes(steps.total),
      'success': of_episodes(steps.total > 0),
      'reward': MeanMetric(steps.reward.sum(), size),
      'entropy': MeanMetric(steps.entropy.sum(), size),
    },
  )
