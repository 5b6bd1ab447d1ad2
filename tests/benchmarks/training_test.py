"""What the bench says of a training step, at a size that compiles quickly."""

import numpy as np

from meliad_rec.benchmarks import training
from meliad_rec.models.model import Model
from tests.architectures import D
from tests.architectures import F
from tests.architectures import H
from tests.architectures import K
from tests.architectures import T
from tests.architectures import V
from tests.architectures import W
from tests.architectures import windowed

ROWS = 2


def program(layers):
  return training.program(Model(V, windowed(layers), D), ROWS, T)


def test_rows_say_what_a_step_costs():
  programs = {f'{n} layers': program(n) for n in (1, 2)}
  one, two = training.measure(programs, '2 layers', rounds=3).values()
  assert two.ratio == 1
  assert one.ratio == np.median(np.divide(one.times.wall, two.times.wall))
  for row in (one, two):
    assert len(row.times.wall) == 3
    assert row.tokens == ROWS * T
    assert row.temporary_bytes > 0 and row.compile_seconds > 0
  weights = 4 * D * H * K + 2 * D * F
  assert two.parameters - one.parameters > weights
  # Forward and backward, and of attention at least the window itself.
  assert two.flops - one.flops >= 6 * ROWS * T * (weights + 2 * W * H * K)
  assert two.flops < 2 * one.flops


def test_each_step_goes_on_from_the_one_before():
  p, seen = program(1), []
  compiled = p.train_step

  def train_step(state, batch):
    seen.append(int(state.step))
    return compiled(state, batch)

  p.__dict__['train_step'] = train_step  # Where cached_property keeps it.
  step = training._stepper(p)
  step()
  step()
  assert seen == [0, 1]
