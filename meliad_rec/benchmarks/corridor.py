"""Trains agents to remember a color, with architectures and spans of attention.

  meliad-rec bench corridor --seeds=3

Figure 3 of Fan et al. 2020 at a size for a CPU. A Transformer of 2 layers
sees twice its span back: with a span of 2 it cannot connect the doors with the
color 6 steps earlier, and with a span of 3 it just can. A Feedback Transformer
can with any span: its memory is recurrent. All seeds are trained in one
program.
"""

import dataclasses
import functools
import time

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import optax

from meliad_rec.archs import stack
from meliad_rec.archs.feedback import Feedback
from meliad_rec.archs.lstm import LSTM
from meliad_rec.archs.window import WindowLayer
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.models.cell import Cell
from meliad_rec.reinforcement import a2c
from meliad_rec.reinforcement.agent import Agent
from meliad_rec.reinforcement.corridor import Corridor
from meliad_rec.training import optimizer
from meliad_rec.training import schedules


@dataclasses.dataclass(frozen=True)
class CorridorSizes:
  """Sizes that all agents share.

  Attributes:
    config: configuration of every layer; `spans` replace its window.
    layers: number of layers.
    spans: spans of attention, in steps of the agent.
    length: steps through the corridor.
    rows: environments of each agent.
    segment: steps of each environment per update.
    updates: number of updates; the learning rate falls linearly to 0.
    learning_rate: of Adam, at the first update.
    a2c: weights of the losses.
  """

  config: LayerConfig
  layers: int
  spans: tuple[int, ...]
  length: int
  rows: int
  segment: int
  updates: int
  learning_rate: float
  a2c: a2c.A2C


SIZES = CorridorSizes(
  LayerConfig(d_model=32, num_heads=2, head_dim=16, mlp_dim=64, window=8),
  layers=2,
  spans=(2, 3, 8),
  length=6,
  rows=64,
  segment=24,
  updates=1500,
  learning_rate=1e-3,
  a2c=a2c.A2C(entropy_cost=0.01),
)


@dataclasses.dataclass(frozen=True)
class Score:
  """Returns of one architecture's agents.

  Attributes:
    returns: for each seed, the mean return of the episodes that ended in the
      last tenth of the updates, without discount.
    frames: steps of all environments of a seed.
    seconds: wall-clock time of training all seeds, with compilation.
  """

  returns: list[float]
  frames: int
  seconds: float

  def columns(self, baseline: str) -> dict[str, str]:
    """Returns {column: text} for a row of the table; there is no baseline."""
    del baseline
    return {
      'return': f'{np.mean(self.returns):.2f}',
      'of each seed': ' '.join(f'{value:.2f}' for value in self.returns),
      'M frames': f'{self.frames / 1e6:.1f}',
      'seconds': f'{self.seconds:.0f}',
    }


def cells(sizes: CorridorSizes) -> dict[str, Cell]:
  """Returns {name of the row in the table: cell of the agent}."""
  found = {}
  for span in sizes.spans:
    config = dataclasses.replace(sizes.config, window=span)
    window = functools.partial(WindowLayer, config)
    found[f'feedback {span}'] = Feedback(config=config, count=sizes.layers)
    found[f'window {span}'] = stack.layers(sizes.layers, window)
  lstm = functools.partial(LSTM, sizes.config.d_model)
  return found | {'lstm': stack.layers(sizes.layers, lstm)}


def measure(sizes: CorridorSizes, seeds: int) -> dict[str, Score]:
  """Returns {name of the row in the table: its Score}.

  Args:
    sizes: sizes and settings of training.
    seeds: number of agents of each row.
  """
  scores = {}
  for name, cell in cells(sizes).items():
    start = time.perf_counter()
    scores[name] = Score(
      returns=np.asarray(train(sizes, cell, seeds)).tolist(),
      frames=sizes.rows * sizes.segment * sizes.updates,
      seconds=time.perf_counter() - start,
    )
    logging.info('%s: %s', name, scores[name].columns(''))
  return scores


def train(sizes: CorridorSizes, cell: Cell, seeds: int) -> jax.Array:
  """Trains an agent of each seed, and returns their Score.returns."""
  env = Corridor(sizes.length)
  agent = Agent(cell, sizes.config.d_model, env.actions)
  chain = optimizer.chain(
    functools.partial(optimizer.adamw, b2=0.999, weight_decay=0.0),
    schedules.linear(sizes.learning_rate, sizes.updates),
    clip_norm=1.0,
  )

  def create(seed):
    key, env_key, act_key = jax.random.split(jax.random.key(seed), 3)
    params = a2c.initialize(agent, env, sizes.rows, key)
    acting = a2c.begin(agent, env, params, sizes.rows, env_key)
    keys = jax.random.split(act_key, sizes.updates)
    return (params, chain.init(params), acting), keys

  def update(state, key):
    params, opt_state, acting = state
    grads, (_, acting, steps) = a2c.gradient(
      agent, env, sizes.a2c, params, acting, sizes.segment, key
    )
    updates, opt_state = chain.update(grads, opt_state, params, steps.done.size)
    params = optax.apply_updates(params, updates)
    ended = steps.done.sum(), jnp.sum(steps.total * steps.done)
    return (params, opt_state, acting), ended

  def live(seed):
    _, (count_N, total_N) = jax.lax.scan(update, *create(seed))
    last = slice(-max(sizes.updates // 10, 1), None)
    return total_N[last].sum() / count_N[last].sum()

  return jax.jit(jax.vmap(live))(jnp.arange(seeds))
