"""A run of agents, opened from its folder: it plays episodes.

run = load_agent('runs/corridor')
run.play(episodes=100)['mean_return'].mean()
"""

from collections.abc import Callable
import dataclasses
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.config.saved import MODEL
from meliad_rec.config.saved import SavedConfig
from meliad_rec.config.values import check_count
from meliad_rec.config.values import check_path
from meliad_rec.distributed import partition
from meliad_rec.models.model import Model
from meliad_rec.reinforcement import a2c
from meliad_rec.reinforcement.agent import Agent
from meliad_rec.reinforcement.environment import Environment
from meliad_rec.runs import folder as run_folder
from meliad_rec.storage.workdir import place
from meliad_rec.training.agent_program import agent_of
from meliad_rec.training.agents import episodes as play_episodes
from meliad_rec.training.experiment import Experiment

_ENVIRONMENTS = ('meliad_rec.reinforcement',)


def load_agent(
  workdir: str | os.PathLike[str],
  step: int | str | None = None,
  trusted: bool = False,
  index: int = 0,
) -> 'AgentRun':
  """Opens a run of agents.

  Args:
    workdir: folder that training wrote.
    step: step of a checkpoint, or 'best' for the best on validation. None: the
      newest checkpoint.
    trusted: whether config.gin may import and call modules outside meliad_rec.
      Set it only for folders whose author you trust.
    index: which agent to open, from 0, if the run trained several (AGENTS).

  Raises:
    ValueError: the folder has no run of agents, no such checkpoint or no such
      agent, or is damaged.
  """
  check_path('workdir', workdir)
  if step not in (None, 'best'):
    run_folder.check_step(step)
  folder = place(workdir)
  text, facts, _ = run_folder.read(folder)
  if not run_folder.is_of_agents(facts):
    raise ValueError(
      f'{folder} is a run on text, and no agent. Open it with '
      'meliad_rec.load_run.'
    )
  config = SavedConfig(text, str(folder / run_folder.CONFIG), trusted)
  env = config.argument(Experiment, 'data', _ENVIRONMENTS)
  agents = config.argument(Experiment, 'objective', _ENVIRONMENTS).agents
  if not 0 <= index < agents:
    raise ValueError(
      f'The agents of {folder} have the numbers 0 to {agents - 1}, got '
      f'{index}. Give one of them.'
    )
  agent = agent_of(config.build(Model, {'vocab': env.actions}, MODEL), env)
  shapes = jax.eval_shape(
    lambda key: a2c.initialize(agent, env, 1, key), jax.random.key(0)
  )
  mesh = partition.make_mesh(devices=jax.local_devices()[:1])
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  several = (agents,) if agents > 1 else ()
  target = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(
      (*several, *a.shape), a.dtype, sharding=sharding
    ),
    shapes,
  )
  step, params, _ = run_folder.read_params(folder, facts, target, step)
  if several:
    params = jax.tree.map(lambda a: a[index], params)
  return AgentRun(agent, env, params, step)


@dataclasses.dataclass(frozen=True)
class AgentRun:
  """An agent with its parameters and its environment; see load_agent.

  Attributes:
    agent: the agent.
    env: its environment.
    params: its parameters.
    step: training step of the checkpoint.
  """

  agent: Agent
  env: Environment
  params: Any = dataclasses.field(repr=False)
  step: int

  def play(
    self, episodes: int = 100, *, seed: int = 0, greedy: bool = False
  ) -> dict[str, np.ndarray]:
    """Plays episodes.

    Args:
      episodes: number of episodes.
      seed: at least 0 and below 2**32; equal seeds give equal episodes.
      greedy: whether to take the likeliest action instead of drawing one.

    Returns:
      {metric: value of each episode}: 'mean_return' without discount, 'success'
      (whether the return is above 0), and 'episode_steps'.

    Raises:
      ValueError: an argument is out of its range.
    """
    check_count('episodes', episodes, 1)
    found = self._play(self.params, _key(seed), episodes, greedy)
    return jax.tree.map(np.asarray, found)

  def pictures(
    self, *, seed: int = 0, greedy: bool = False
  ) -> list[np.ndarray]:
    """Plays one episode, and returns a picture of each state before an action.

    Args:
      seed, greedy: as in `play`.

    Returns:
      Pictures in red, green and blue, uint8 [height, width, 3].
    """
    worlds, done_T = jax.tree.map(
      np.asarray, self._film(self.params, _key(seed), greedy)
    )
    return [
      self.env.picture(jax.tree.map(lambda a, t=t: a[t, 0], worlds))
      for t in range(int(done_T.argmax()) + 1)
    ]

  @functools.cached_property
  def _play(self) -> Callable:
    """Compiled function of (params, key, episodes, whether greedy)."""

    def play(params, key, episodes, greedy):
      return play_episodes(
        self.agent, self.env, params, episodes, key, _choice(greedy)
      )

    return jax.jit(play, static_argnums=(2, 3))

  @functools.cached_property
  def _film(self) -> Callable:
    """Compiled function of (params, key, whether greedy): each state."""
    agent, env = self.agent, self.env

    def film(params, key, greedy):
      begin_key, key = jax.random.split(key)

      def step(acting, key):
        after, steps = a2c.act(agent, env, params, acting, key, _choice(greedy))
        return after, (acting.world, steps.done[0])

      acting = a2c.begin(agent, env, params, 1, begin_key)
      return jax.lax.scan(step, acting, jax.random.split(key, env.limit))[1]

    return jax.jit(film, static_argnums=2)


def _choice(greedy: bool) -> Callable:
  if greedy:
    return lambda key, logits_BA: jnp.argmax(logits_BA, 1)
  return jax.random.categorical


def _key(seed: int) -> jax.Array:
  check_count('seed', seed, 0, 2**32)
  return jax.random.key(np.uint32(seed))
