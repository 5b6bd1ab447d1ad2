"""Learning rates, AdamW, clipping, accumulation.

Adafactor by hand is in train_step_test.py.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meliad_rec.training import optimizer
from meliad_rec.training import schedules

CONSTANT = schedules.constant(0.5)
RSQRT = schedules.rsqrt(1000)
COSINE = schedules.cosine(1.0, 100, warmup_steps=10, final=0.1)
LINEAR = schedules.linear(1.0, 100, warmup_steps=10, final=0.2)
ONE_CYCLE = schedules.one_cycle(0.5, 21, warmup_steps=5)
MOMENTUM = schedules.one_cycle_momentum(21, warmup_steps=5)
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
    (MOMENTUM, {0: 0.95, 2: 0.9, 4: 0.85, 12: 0.9, 20: 0.95, 300: 0.95}),
    (schedules.constant(0.4, 4), {0: 0, 1: 0.1, 4: 0.4, 9: 0.4}),
    # Without a warm-up the first step has the peak.
    (schedules.cosine(0.3, 7), {0: 0.3}),
    # A run of a single step has none.
    (schedules.rsqrt(total_steps=1), {0: 0.1}),
  ],
)
def test_learning_rates(schedule, rates):
  for step, rate in rates.items():
    found = jax.jit(schedule)(np.int32(step))
    assert found == pytest.approx(rate, rel=1e-5, abs=1e-9)


def test_warm_up_of_runs_that_set_none():
  steps = {1: 0, 4: 1, 60: 3, 2000: 100, 20_000: 1000, 500_000: 1000}
  assert {n: schedules.default_warmup(None, n) for n in steps} == steps


@pytest.mark.parametrize(
  'make, setting',
  [
    (lambda: schedules.rsqrt(0), 'WARMUP_STEPS'),
    (lambda: schedules.rsqrt(5, scale=0.0), 'LEARNING_RATE'),
    (lambda: schedules.rsqrt(5, scale=math.inf), 'LEARNING_RATE'),
    (lambda: schedules.linear(math.inf, 5), 'LEARNING_RATE'),
    (lambda: schedules.cosine(0.0, 5), 'LEARNING_RATE'),
    (
      lambda: schedules.cosine(0.1, 5, final=0.2),
      'the argument final of the schedule',
    ),
    (lambda: schedules.linear(0.1, 0), 'STEPS'),
    (lambda: schedules.linear(0.1, 5, warmup_steps=5), 'WARMUP_STEPS'),
    (lambda: schedules.constant(0.1, warmup_steps=-1), 'WARMUP_STEPS'),
    (lambda: schedules.one_cycle(-0.1, 5, warmup_steps=2), 'LEARNING_RATE'),
    (lambda: schedules.one_cycle(0.1, 5, warmup_steps=1), 'WARMUP_STEPS'),
    (lambda: schedules.one_cycle_momentum(5, warmup_steps=5), 'WARMUP_STEPS'),
    (lambda: optimizer.chain(optax.sgd, CONSTANT, 0.0), 'optim.*clip_norm'),
    (lambda: optimizer.chain(optax.sgd, CONSTANT, every=0), 'optim.*every'),
    (lambda: optimizer.chain(optax.sgd, CONSTANT, every=2**31), 'optim.*every'),
    (lambda: optimizer.scale_by_path({'a': 1.0, 'b(': 2.0}), 'opt.*factors'),
  ],
)
def test_settings_out_of_range(make, setting):
  with pytest.raises(ValueError, match=f'Set {setting}.$'):
    make()


def trained(chained, params, gradients, tokens=None):
  """Returns the parameters after each gradient, and the last state."""
  state, seen = jax.jit(chained.init)(params), []

  @jax.jit
  def step(gradient, state, params, count):
    updates, state = chained.update(gradient, state, params, count)
    return optax.apply_updates(params, updates), state

  for i, gradient in enumerate(gradients):
    count = tokens[i] if tokens else 4
    params, state = step(gradient, state, params, count)
    seen.append(params)
  return seen, state


def of_w(*values):
  return [{'w': jnp.array(value)} for value in values]


def test_adafactor_is_that_of_optax():
  """Also for tiny parameters, and for those stacked by a scan."""
  rng = np.random.default_rng(0)
  shapes = {'large': (130, 200), 'stacked': (2, 130, 140), 'small': (7,)}
  draw = lambda scale: {
    name: (scale * rng.normal(size=shape)).astype(np.float32)
    for name, shape in shapes.items()
  }
  first = draw(0.3) | {'tiny': np.full((3,), 1e-5, np.float32)}
  ours = optimizer.adafactor(RSQRT)
  theirs = optax.adafactor(
    RSQRT,
    multiply_by_parameter_scale=True,
    momentum=0.9,
    dtype_momentum=jnp.float32,
    weight_decay_rate=None,
  )
  found = {}
  for name, rule in {'ours': ours, 'theirs': theirs}.items():
    rng = np.random.default_rng(1)
    params, state = first, rule.init(first)
    for _ in range(3):
      gradients = draw(4.0) | {'tiny': np.ones(3, np.float32)}
      updates, state = rule.update(gradients, state, params)
      params = optax.apply_updates(params, updates)
    found[name] = params, state
  # The structure is the same too, so checkpoints of either fit the other.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-12),
    found['ours'],
    found['theirs'],
  )
  moved = np.abs(found['ours'][0]['large'] - first['large'])
  assert moved.max() > 1e-6


def test_adafactor_factors_large_matrices_only():
  params = {'big': jnp.ones((128, 130)), 'small': jnp.ones((3, 130))}
  second, *_ = jax.eval_shape(optimizer.adafactor(CONSTANT).init, params)
  assert second.v_row['big'].shape == (128,)
  assert second.v['small'].shape == (3, 130)


def test_adamw_by_hand_decays_kernels_only():
  params = {
    'w': jnp.array([1.0]),
    'table': jnp.full((3, 2), 2.0),
    'layer': {'kernel': jnp.full((2, 3), 2.0), 'bias': jnp.full(3, 2.0)},
    'norms': {'scale': jnp.full((4, 2), 2.0)},
    'lstm': {
      name: jnp.full((4, 2), 2.0) for name in ('recurrence', 'input_kernel')
    },
  }
  gradients = jax.tree.map(jnp.zeros_like, params) | {'w': jnp.array([-3.0])}
  rule = lambda schedule: optimizer.adamw(schedule, weight_decay=0.1)
  [new], _ = trained(optimizer.chain(rule, CONSTANT), params, [gradients])
  np.testing.assert_allclose(new['w'], 1.5, rtol=1e-5)
  for decayed in new['layer']['kernel'], *new['lstm'].values():
    np.testing.assert_allclose(decayed, 2 - 0.5 * 0.1 * 2)
  for same in new['table'], new['layer']['bias'], new['norms']['scale']:
    np.testing.assert_array_equal(same, 2)


def test_momentum_has_a_schedule():
  """Adam by hand; the schedules count training steps, not updates."""
  rate, momentum = schedules.linear(0.5, 10), schedules.linear(0.9, 8)
  rule = lambda rate, b1: optimizer.adamw(rate, b1=b1, weight_decay=0.0)
  chained = optimizer.chain(rule, rate, every=2, momentum=momentum)
  gradients = [1.0, -3.0, 2.0]
  twice = of_w(*[[g] for g in gradients for _ in range(2)])
  seen, _ = trained(chained, *of_w([0.0]), twice)
  w, mean, square = 0.0, 0.0, 0.0
  for i, gradient in enumerate(gradients):
    b1 = 0.9 * (1 - 2 * i / 8)
    mean = b1 * mean + (1 - b1) * gradient
    square = 0.98 * square + 0.02 * gradient**2
    root = np.sqrt(square / (1 - 0.98 ** (i + 1)))
    w -= 0.5 * (1 - 2 * i / 10) * mean / (1 - b1 ** (i + 1)) / root
    np.testing.assert_allclose(seen[2 * i + 1]['w'], w, rtol=1e-5)


def test_some_parameters_have_another_rate():
  params = {'a': {'gate': jnp.ones(2), 'gated': jnp.ones(2)}, 'b': jnp.ones(2)}
  # Factors of gradients would change no update of Adam.
  rule = lambda rate: optimizer.adamw(rate, weight_decay=0.0)
  plain, scaled = (
    optimizer.chain(rule, lambda step: 0.5, factors=factors)
    for factors in (None, {'/gate$': 10.0, 'gate': 2.0})
  )
  gradients = jax.tree.map(lambda p: 3 * p, params)
  one, other = (
    made.update(gradients, made.init(params), params, 1)[0]
    for made in (plain, scaled)
  )
  ratio = jax.tree.map(lambda a, b: float(b[0] / a[0]), one, other)
  assert ratio == {'a': {'gate': 10.0, 'gated': 2.0}, 'b': 1.0}
  for factors in {'gates': 2.0}, {'gate': 2.0, '/gate$': 10.0}:
    made = optimizer.chain(optax.sgd, lambda step: 0.5, factors=factors)
    with pytest.raises(
      ValueError, match=re.escape(f'{[*factors][-1]!r} fits no')
    ):
      made.init(params)


def test_clipping_is_by_the_global_norm():
  params = {'a': jnp.zeros(1), 'b': jnp.zeros(1)}
  gradients = {'a': jnp.array([3.0]), 'b': jnp.array([4.0])}
  # A clipped update would have a norm of 1.
  chained = optimizer.chain(optax.sgd, CONSTANT, clip_norm=1.0)
  [new], _ = trained(chained, params, [gradients])
  np.testing.assert_allclose([-new['a'][0], -new['b'][0]], [0.3, 0.4])


def test_the_rate_reported_is_the_rate_used():
  chained = optimizer.chain(optax.sgd, schedules.linear(0.8, 10), every=3)
  seen, _ = trained(chained, *of_w([0.0]), of_w(*[[1.0]] * 9))
  moves = -np.diff([float(new['w'][0]) for new in seen])
  for step in 5, 8:
    rate = float(chained.learning_rate(step))
    assert moves[step - 1] == pytest.approx(rate, rel=1e-6)
    assert rate == pytest.approx(0.8 - 0.08 * (step - 2))


def test_a_nan_gradient_reaches_the_parameters():
  chained = optimizer.chain(optimizer.adafactor, CONSTANT, clip_norm=1.0)
  [new], _ = trained(chained, *of_w([1.0, 1.0]), of_w([1.0, np.nan]))
  assert np.isnan(new['w']).any()


def test_ema_starts_fast_and_then_keeps_its_decay():
  ema, params = of_w([0.0], [1.0])
  early = optimizer.ema_update(ema, params, 0.99, jnp.int32(0))
  np.testing.assert_allclose(early['w'], 0.9, rtol=1e-6)
  late = optimizer.ema_update(ema, params, 0.99, jnp.int32(10_000))
  np.testing.assert_allclose(late['w'], 0.01, rtol=1e-5)


def test_accumulated_segments_are_one_segment():
  """Clipped after their mean over tokens; some have no token."""
  make = lambda every, clip_norm=None: optimizer.chain(
    optax.sgd, schedules.constant(1.0), clip_norm, every
  )
  [params] = of_w([0.5, 0.25])
  gradients = of_w([1.0, -2.0], [4.0, 1.0], [7.0, 5.0])
  seen, _ = trained(make(3), params, gradients, [3, 1, 0])
  for unchanged in seen[:2]:
    np.testing.assert_array_equal(unchanged['w'], params['w'])
  # (3 * 1 + 1 * 4) / 4 = 1.75 and (3 * -2 + 1 * 1) / 4 = -1.25
  np.testing.assert_allclose(seen[2]['w'], [0.5 - 1.75, 0.25 + 1.25])
  seen, _ = trained(make(2), params, gradients[:2], [0, 0])
  np.testing.assert_array_equal(seen[1]['w'], params['w'])
  seen, _ = trained(make(2, 1.0), params, of_w([10.0, 0.0], [-10.0, 0.5]))
  np.testing.assert_allclose(seen[1]['w'], [0.5, 0.25 - 0.25])


def test_two_updates_equal_two_of_the_inner_optimizer():
  make = lambda every: optimizer.chain(
    optimizer.adafactor, schedules.constant(0.1), every=every
  )
  [params] = of_w([0.5, 0.25])
  gradients = of_w(*[[1.0, -2.0], [4.0, 1.0]] * 2)
  seen, state = trained(make(2), params, gradients, [3, 1] * 2)
  plain, _ = trained(make(1), params, of_w(*[[1.75, -1.25]] * 2))
  np.testing.assert_allclose(seen[1]['w'], plain[0]['w'], rtol=1e-6)
  np.testing.assert_allclose(seen[3]['w'], plain[1]['w'], rtol=1e-6)
  assert (state.steps, state.tokens) == (0, 0)
  assert not np.any(state.gradients['w'])


def test_sums_are_float32_and_updates_have_the_parameters_dtype():
  init, update = optimizer.accumulate(optax.sgd(1.0), 2)
  params = {'w': jnp.ones(2, jnp.bfloat16)}
  updates, state = jax.eval_shape(update, params, init(params), params, 5)
  assert state.gradients['w'].dtype == jnp.float32
  assert updates['w'].dtype == jnp.bfloat16


def test_finetune_lowers_the_rate_of_the_last_steps():
  schedule = schedules.finetune(LINEAR, 100, 30)
  rates = [float(schedule(step) / LINEAR(step)) for step in (1, 69, 70, 99)]
  assert rates == pytest.approx([1, 1, 0.1, 0.1])
  with pytest.raises(ValueError, match='FINETUNE_STEPS'):
    schedules.finetune(LINEAR, 100, 101)
