"""Uses the public names as a user's typed code does; mypy checks it.

Nothing runs it: .ci/run gives it to mypy, which must know each name, argument
and result.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from typing import assert_type

import jax
import numpy as np

import meliad_rec
from meliad_rec import Block
from meliad_rec import Cell
from meliad_rec import Experiment
from meliad_rec import FeedForward
from meliad_rec import gates
from meliad_rec import losses
from meliad_rec import Model
from meliad_rec import optimizer
from meliad_rec import positions
from meliad_rec import Sampler
from meliad_rec import schedules
from meliad_rec import stack
from meliad_rec import TrainedRun


def use_a_run() -> None:
  run = meliad_rec.load_run('runs/small', step='best')
  assert_type(run, TrainedRun)
  assert_type(run.step, int)
  assert_type(run.generate('It was', tokens=20, top_k=5), list[str])
  assert_type(run.stream('It was'), Iterator[str])
  assert_type(run.evaluate(['a', 'b']), dict[str, float])
  assert_type(run.nats('text'), tuple[np.ndarray, np.ndarray])
  run.save_state('state.npz', run.read('It was'))
  run.export('exported')


def wrong_types() -> None:
  """Each line is an error; mypy reports a comment that hides none."""
  meliad_rec.load_run(3)  # type: ignore[arg-type]
  meliad_rec.load_ran('run')  # type: ignore[attr-defined]
  run = meliad_rec.load_run('run')
  run.generate(123)  # type: ignore[arg-type]
  run.generate('a', top_k=0.5)  # type: ignore[arg-type]
  run.evaluate(7)  # type: ignore[arg-type]
  Sampler(temperature='warm')  # type: ignore[arg-type]
  Sampler(temprature=1.0)  # type: ignore[call-arg]


def rates(experiment: Experiment) -> float:
  made = optimizer.chain(optimizer.adamw, schedules.constant(0.01))
  experiment.optimizer.learning_rate(experiment.steps)
  return float(made.learning_rate(3))


def parts(cell: Cell, block: Block, model: Model) -> jax.Array:
  feed_forward = FeedForward(32, 'float32', gates.Residual)
  assert_type(block.x, jax.Array)
  print(feed_forward, positions.T5Bias, stack.layers, model.cell is cell)
  logits_BTV = model.logits_divisor
  print(losses.cross_entropy, logits_BTV)
  return block.mask


class Printing:
  """A logger of metrics, which an Experiment accepts."""

  def start(
    self, workdir: str, step: int, config: Mapping[str, object]
  ) -> None:
    print(workdir, step, config)

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    print(step, metrics)

  def close(self) -> None:
    pass


def logged(experiment: Experiment) -> None:
  import dataclasses

  dataclasses.replace(experiment, metrics_logger=Printing())
