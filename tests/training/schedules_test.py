"""Learning rates by hand."""

import jax
import numpy as np
import pytest

from meliad_rec.training import schedules

RSQRT = schedules.rsqrt(1000)
COSINE = schedules.cosine(1.0, 100, warmup_steps=10, final=0.1)
LINEAR = schedules.linear(1.0, 100, warmup_steps=10, final=0.2)
ONE_CYCLE = schedules.one_cycle(0.5, 21, warmup_steps=5)
CONSTANT = schedules.constant(0.4, warmup_steps=4)
AT_10 = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi / 10))  # The cosine at step 10.


@pytest.mark.parametrize(
  'schedule, rates',
  [
    # At step 500, half the ramp times 1 / sqrt(1000).
    (RSQRT, {0: 0, 1: 0.0316228 / 1000, 500: 0.0158114, 1000: 0.0316228}),
    (RSQRT, {4000: 0.0158114, 500_000: 0.00141421}),
    (schedules.rsqrt(4, scale=3.0), {9: 1.0}),
    (COSINE, {0: 0, 5: 0.5 * AT_10, 10: AT_10, 50: 0.55, 100: 0.1, 1000: 0.1}),
    (LINEAR, {0: 0, 5: 0.46, 10: 0.92, 50: 0.6, 100: 0.2, 300: 0.2}),
    (ONE_CYCLE, {0: 0.02, 2: 0.26, 4: 0.5, 12: 0.250001, 20: 2e-6, 300: 2e-6}),
    (CONSTANT, {0: 0, 1: 0.1, 4: 0.4, 9: 0.4}),
    # Without a warm-up the first step has the peak.
    (schedules.constant(0.3), {0: 0.3}),
    (schedules.cosine(0.3, 7), {0: 0.3}),
    (schedules.linear(0.3, 7), {0: 0.3}),
  ],
)
def test_rates(schedule, rates):
  for step, rate in rates.items():
    assert schedule(step) == pytest.approx(rate, rel=1e-5, abs=1e-9)


def test_a_compiled_schedule_takes_an_integer_step():
  schedule = schedules.rsqrt(9)
  assert jax.jit(schedule)(np.int32(16)) == pytest.approx(0.25)


@pytest.mark.parametrize(
  'make, setting',
  [
    (lambda: schedules.rsqrt(0), 'WARMUP_STEPS'),
    (lambda: schedules.rsqrt(5, scale=0.0), 'LEARNING_RATE'),
    (lambda: schedules.cosine(0.0, 5), 'LEARNING_RATE'),
    (lambda: schedules.cosine(0.1, 5, final=0.2), 'final'),
    (lambda: schedules.linear(0.1, 0), 'STEPS'),
    (lambda: schedules.linear(0.1, 5, warmup_steps=5), 'WARMUP_STEPS'),
    (lambda: schedules.constant(0.1, warmup_steps=-1), 'WARMUP_STEPS'),
    (lambda: schedules.one_cycle(-0.1, 5, warmup_steps=2), 'LEARNING_RATE'),
    (lambda: schedules.one_cycle(0.1, 5, warmup_steps=1), 'WARMUP_STEPS'),
    (lambda: schedules.one_cycle(0.1, 5, warmup_steps=5), 'WARMUP_STEPS'),
  ],
)
def test_settings_out_of_range(make, setting):
  with pytest.raises(ValueError, match=f'Set {setting}.$'):
    make()
