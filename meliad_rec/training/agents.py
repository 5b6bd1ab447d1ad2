"""Data, evaluation and metrics of a run of agents."""

from collections.abc import Callable
from collections.abc import Iterator
import functools

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.data.lanes import Position
from meliad_rec.metrics.totals import Totals
from meliad_rec.reinforcement import a2c
from meliad_rec.report.report import Report
from meliad_rec.training.agent_program import AgentProgram
from meliad_rec.training.agent_program import EMPTY
from meliad_rec.training.experiment import Experiment
from meliad_rec.training.meter import StepMeter

_SEED = 2**31  # Seed of the episodes in evaluations.


class Frames:
  """Iterator over training steps; yields (EMPTY, position of the next step).

  Args:
    frames: steps of all agents in all environments in a training step.
    segment: steps of each agent in one environment.
  """

  def __init__(self, frames: int, segment: int):
    self._frames, self._step = frames, 0
    self.segments = {segment}
    self.local_rows = np.zeros(0, int)  # Agents read no rows of data.

  def __iter__(self) -> Iterator:
    return self

  def __next__(self):
    self._step += 1
    return EMPTY, self.position

  @property
  def position(self) -> Position:
    """The training steps so far, and their frames as `tokens`."""
    return {'step': self._step, 'tokens': self._step * self._frames}

  def seek(self, position: Position) -> None:
    """Continues at a position."""
    self._step = int(position['step'])  # type: ignore[arg-type]


class AgentMeter(StepMeter):
  """A counter of the metrics and the time of agents' training steps."""

  def quality(self, totals: Totals) -> dict[str, float]:
    return {'tokens': totals.tokens}


class AgentValidation:
  """An evaluator of agents on new episodes, the same in each evaluation.

  Args:
    experiment: the experiment. Its `eval_subset.documents` is the number of
      episodes; None: as many as environments.

  Raises:
    ValueError: the experiment has settings that only models of text read.
  """

  def __init__(self, experiment: Experiment):
    check(experiment)
    self._program = experiment.program
    self._rows = experiment.eval_subset.documents or experiment.batch

  @property
  def identity(self) -> str:
    """Identity of the episodes, as text."""
    return f'{self._rows} episodes of {self._program.env!r}'

  def evaluate(
    self, params, step: int, report: Report, stop: Callable[[], bool]
  ) -> dict[str, float] | None:
    """Plays episodes, and reports the metrics.

    Args:
      params: parameters of the agents.
      step: training steps so far.
      report: where the metrics are written.
      stop: if it returns True at the end, nothing is reported.

    Returns:
      {metric: value}; None if `stop` ended the evaluation.
    """
    with jax.set_mesh(self._program.mesh):
      found = {k: np.atleast_1d(v) for k, v in self._play(params).items()}
    if stop():
      return None
    metrics = {name: float(value_N.mean()) for name, value_N in found.items()}
    if len(found['mean_return']) > 1:
      for i, value in enumerate(found['mean_return']):
        metrics[f'mean_return_{i}'] = float(value)
    report.write(step, metrics, 'validation')
    report.plot('mean_return')
    return metrics

  @functools.cached_property
  def _play(self) -> Callable:
    """Compiled function: params -> {metric: value of each agent}."""
    program = self._program

    def play(params):
      key = jax.random.key(_SEED)
      found = episodes(program.agent, program.env, params, self._rows, key)
      return {name: value_B.mean() for name, value_B in found.items()}

    return jax.jit(program.over_agents(play, (0,), 0))


def episodes(
  agent, env, params, rows: int, key: jax.Array, choose=jax.random.categorical
) -> dict[str, jax.Array]:
  """Plays one episode in each row.

  Args:
    agent, env, params: the agent and its environment.
    rows: number of episodes.
    key: random key.
    choose: (key, logits_BA) -> action_B.

  Returns:
    {metric: [rows], float32}: the return without discount, whether it is above
    0, and the steps of each episode.
  """
  begin_key, key = jax.random.split(key)
  acting = a2c.begin(agent, env, params, rows, begin_key)

  def step(carry, key):
    acting, return_B, ended_B = carry
    acting, steps = a2c.act(agent, env, params, acting, key, choose)
    return_B = jnp.where(ended_B, return_B, steps.total)
    return (acting, return_B, ended_B | steps.done), ~ended_B

  start = acting, jnp.zeros(rows), jnp.zeros(rows, bool)
  keys = jax.random.split(key, env.limit)
  (_, return_B, _), playing_TB = jax.lax.scan(step, start, keys)
  return {
    'mean_return': return_B,
    'success': (return_B > 0).astype(jnp.float32),
    'episode_steps': playing_TB.sum(0, dtype=jnp.float32),
  }


def check(experiment: Experiment) -> None:
  """Raises ValueError if settings are given that agents do not read."""
  measured = 'mean_return', 'success'
  if experiment.best_metric not in measured:
    raise ValueError(
      f'best_metric is {experiment.best_metric!r}, but evaluations of agents '
      f'give only {", ".join(measured)}. Set '
      'experiment.Experiment.best_metric to one of them.'
    )
  for setting, value, needed in (
    ('SAMPLE', experiment.sample.length, 0),
    ('EVAL_TOKENS', experiment.eval_subset.tokens, None),
    ('HALT_WARMUP', experiment.halting_warmup, 0),
    ('BUCKETS', experiment.buckets, 1),
    ('SOURCE_SEGMENT', experiment.source_segment, None),
    ('experiment.Experiment.shorter_first', experiment.shorter_first, None),
  ):
    if value != needed:
      raise ValueError(
        f'{setting} is {value!r}, but agents do not read text. Set {setting} = '
        f'{needed}.'
      )


def description(experiment: Experiment) -> str:
  """Returns the environments of an experiment in words."""
  program = experiment.program
  assert isinstance(program, AgentProgram)
  agents = program.objective.agents
  many = f' for each of {agents} agents' if agents > 1 else ''
  return f'{experiment.batch:,} environments {program.env!r}{many}'
