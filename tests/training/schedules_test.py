"""Learning rates by hand."""

import jax
import numpy as np
import pytest

from meliad_rec.training import schedules


@pytest.mark.parametrize(
  'step, rate',
  [
    (0, 0.0),
    (1, 0.0316228 / 1000),
    (500, 0.0316228 / 2),  # Half the ramp times the held 1/sqrt(1000).
    (1000, 0.0316228),
    (4000, 0.0158114),
    (500_000, 0.00141421),
  ],
)
def test_rsqrt_is_the_papers(step, rate):
  assert schedules.rsqrt(1000)(step) == pytest.approx(rate, rel=1e-5)


def test_rsqrt_scales():
  assert schedules.rsqrt(4, scale=3.0)(9) == pytest.approx(1.0)


@pytest.mark.parametrize(
  'step, rate',
  [
    (0, 0.0),
    (5, 0.5 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi / 10)))),
    (10, 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi / 10))),
    (50, 0.55),
    (100, 0.1),
    (1000, 0.1),
  ],
)
def test_cosine(step, rate):
  schedule = schedules.cosine(1.0, 100, warmup_steps=10, final=0.1)
  assert schedule(step) == pytest.approx(rate, abs=1e-6)


@pytest.mark.parametrize(
  'step, rate',
  [(0, 0), (5, 0.46), (10, 0.92), (50, 0.6), (100, 0.2), (300, 0.2)],
)
def test_linear(step, rate):
  schedule = schedules.linear(1.0, 100, warmup_steps=10, final=0.2)
  assert schedule(step) == pytest.approx(rate, abs=1e-6)


@pytest.mark.parametrize(
  'step, rate',
  [
    (0, 0.02),
    (2, (0.02 + 0.5) / 2),
    (4, 0.5),
    (12, (0.5 + 2e-6) / 2),
    (20, 2e-6),
    (300, 2e-6),
  ],
)
def test_one_cycle(step, rate):
  schedule = schedules.one_cycle(0.5, 21, warmup_steps=5)
  assert schedule(step) == pytest.approx(rate, rel=1e-5)


@pytest.mark.parametrize('step, rate', [(0, 0), (1, 0.1), (4, 0.4), (9, 0.4)])
def test_constant(step, rate):
  assert schedules.constant(0.4, warmup_steps=4)(step) == pytest.approx(rate)


def test_without_warm_up_the_first_step_has_the_peak():
  assert schedules.constant(0.3)(0) == pytest.approx(0.3)
  assert schedules.cosine(0.3, 7)(0) == pytest.approx(0.3)
  assert schedules.linear(0.3, 7)(0) == pytest.approx(0.3)


def test_a_compiled_schedule_takes_an_integer_step():
  schedule = schedules.rsqrt(9)
  assert jax.jit(schedule)(np.int32(16)) == pytest.approx(0.25)


@pytest.mark.parametrize(
  'make, given',
  [
    (lambda: schedules.rsqrt(0), 'warmup_steps'),
    (lambda: schedules.rsqrt(5, scale=0.0), 'scale'),
    (lambda: schedules.cosine(0.0, 5), 'peak'),
    (lambda: schedules.cosine(0.1, 5, final=0.2), 'final'),
    (lambda: schedules.linear(0.1, 0), 'total_steps'),
    (lambda: schedules.linear(0.1, 5, warmup_steps=5), 'warmup_steps'),
    (lambda: schedules.constant(0.1, warmup_steps=-1), 'warmup_steps'),
    (lambda: schedules.one_cycle(-0.1, 5, warmup_steps=2), 'peak'),
    (lambda: schedules.one_cycle(0.1, 5, warmup_steps=1), 'warmup_steps'),
    (lambda: schedules.one_cycle(0.1, 5, warmup_steps=5), 'warmup_steps'),
  ],
)
def test_settings_out_of_range(make, given):
  settings = {'total_steps': 'STEPS', 'warmup_steps': 'WARMUP_STEPS'}
  settings |= {'peak': 'LEARNING_RATE', 'scale': 'LEARNING_RATE'}
  setting = settings.get(given, given)
  with pytest.raises(ValueError, match=f"'s {given} .* Set {setting}.$"):
    make()
