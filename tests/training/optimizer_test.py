"""Rules by hand, clipping, accumulation, and any optax rule from gin."""

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meliad_rec.training import optimizer
from meliad_rec.training import schedules

CONSTANT = schedules.constant(0.5)


def step(chained, gradients, params, count=1, tokens=4):
  state = chained.init(params)
  for _ in range(count):
    updates, state = chained.update(gradients, state, params, tokens)
    params = optax.apply_updates(params, updates)
  return params


def test_adafactor_by_hand():
  # One step from fresh moments: the second moment is g^2, so that the scaled
  # gradient is sign(g); times lr 0.5, times RMS(w) 5, times 1 - momentum.
  params = {'w': jnp.array([1.0, -7.0])}
  gradients = {'w': jnp.array([0.25, -8.0])}
  new = step(optimizer.chain(optimizer.adafactor, CONSTANT), gradients, params)
  np.testing.assert_allclose(new['w'], [0.75, -6.75], rtol=1e-5)


def test_adafactor_second_step_keeps_momentum():
  params = {'w': jnp.array([1.0, -7.0])}
  gradients = {'w': jnp.array([0.25, -8.0])}
  chained = optimizer.chain(optimizer.adafactor, CONSTANT)
  new = step(chained, gradients, params, count=2)
  rms = np.sqrt((0.75**2 + 6.75**2) / 2)
  move = 0.9 * 0.25 + 0.1 * 0.5 * rms
  np.testing.assert_allclose(new['w'], [0.75 - move, -6.75 + move], rtol=1e-5)


def test_adafactor_factors_large_matrices_only():
  params = {'big': jnp.ones((128, 130)), 'small': jnp.ones((3, 130))}
  state = optimizer.adafactor(CONSTANT).init(params)
  second = state[0]
  assert second.v_row['big'].shape == (128,)
  assert second.v['small'].shape == (3, 130)


def test_adamw_decays_kernels_only():
  params = {
    'table': jnp.full((3, 2), 2.0),
    'layer': {'kernel': jnp.full((2, 3), 2.0), 'bias': jnp.full(3, 2.0)},
    'norms': {'scale': jnp.full((4, 2), 2.0)},
    'lstm': {'recurrence': jnp.full((4, 2), 2.0)},
  }
  gradients = jax.tree.map(jnp.zeros_like, params)
  rule = lambda schedule: optimizer.adamw(schedule, weight_decay=0.1)
  new = step(optimizer.chain(rule, CONSTANT), gradients, params)
  np.testing.assert_allclose(new['layer']['kernel'], 2 - 0.5 * 0.1 * 2)
  np.testing.assert_allclose(new['lstm']['recurrence'], 2 - 0.5 * 0.1 * 2)
  for same in new['table'], new['layer']['bias'], new['norms']['scale']:
    np.testing.assert_array_equal(same, 2)


def test_adamw_by_hand():
  params, gradients = {'w': jnp.array([1.0])}, {'w': jnp.array([-3.0])}
  new = step(optimizer.chain(optimizer.adamw, CONSTANT), gradients, params)
  np.testing.assert_allclose(new['w'], 1.5, rtol=1e-5)


@pytest.mark.parametrize(
  'clip_norm, moved', [(None, [3.0, 4.0]), (6.0, [3.0, 4.0]), (1.0, [0.6, 0.8])]
)
def test_clipping_is_by_the_global_norm(clip_norm, moved):
  params = {'a': jnp.zeros(1), 'b': jnp.zeros(1)}
  gradients = {'a': jnp.array([3.0]), 'b': jnp.array([4.0])}
  chained = optimizer.chain(
    optax.sgd, schedules.constant(1.0), clip_norm=clip_norm
  )
  new = step(chained, gradients, params)
  np.testing.assert_allclose([-new['a'][0], -new['b'][0]], moved, rtol=1e-6)


def test_accumulated_gradients_are_clipped_after_their_mean():
  chained = optimizer.chain(
    optax.sgd, schedules.constant(1.0), clip_norm=1.0, every=2
  )
  params = {'w': jnp.zeros(2)}
  state = chained.init(params)
  for gradient in [10.0, 0.0], [-10.0, 0.5]:
    gradients = {'w': jnp.array(gradient)}
    updates, state = chained.update(gradients, state, params, 4)
  np.testing.assert_allclose(updates['w'], [0, -0.25])


def test_the_rate_reported_is_the_rate_used():
  schedule = schedules.linear(0.8, 10)
  params, gradients = {'w': jnp.zeros(1)}, {'w': jnp.ones(1)}
  chained = optimizer.chain(optax.sgd, schedule, every=3)
  state = chained.init(params)
  for number in range(9):
    updates, state = chained.update(gradients, state, params, 4)
    if number % 3 == 2:
      rate = float(chained.learning_rate(number))
      assert -updates['w'][0] == pytest.approx(rate, rel=1e-6)
      assert rate == pytest.approx(0.8 - 0.08 * (number - 2))


def test_a_nan_gradient_reaches_the_parameters():
  params, gradients = {'w': jnp.ones(2)}, {'w': jnp.array([1.0, jnp.nan])}
  chained = optimizer.chain(optimizer.adafactor, CONSTANT, clip_norm=1.0)
  assert np.isnan(step(chained, gradients, params)['w']).any()


def test_any_rule_of_optax_from_gin():
  with gin.unlock_config():
    gin.clear_config()
    gin.parse_config("""
      from __gin__ import dynamic_registration
      from meliad_rec.training import optimizer
      from meliad_rec.training import schedules
      import optax

      optimizer.chain.rule = @optax.lion
      optimizer.chain.schedule = @schedules.constant()
      schedules.constant.peak = 0.25
      optax.lion.weight_decay = 0.0
    """)
  chained = gin.get_configurable(optimizer.chain)()
  params, gradients = {'w': jnp.zeros(1)}, {'w': jnp.array([-7.0])}
  np.testing.assert_allclose(step(chained, gradients, params)['w'], 0.25)
  assert chained.learning_rate(5) == pytest.approx(0.25)
  gin.clear_config()


def test_ema_starts_fast_and_then_keeps_its_decay():
  ema, params = {'w': jnp.array([0.0])}, {'w': jnp.array([1.0])}
  early = optimizer.ema_update(ema, params, 0.99, jnp.int32(0))
  np.testing.assert_allclose(early['w'], 0.9, rtol=1e-6)
  late = optimizer.ema_update(ema, params, 0.99, jnp.int32(10_000))
  np.testing.assert_allclose(late['w'], 0.01, rtol=1e-5)


@pytest.mark.parametrize(
  'settings, named',
  [({'clip_norm': 0.0}, 'clip_norm'), ({'every': 0}, 'chain.every')],
)
def test_settings_out_of_range(settings, named):
  with pytest.raises(ValueError, match=named):
    optimizer.chain(optax.sgd, CONSTANT, **settings)


GRADS = [jnp.array([1.0, -2.0]), jnp.array([4.0, 1.0]), jnp.array([7.0, 5.0])]
TOKENS = [3, 1, 0]


def accumulated(inner, grads, tokens, every):
  """Parameters after each step."""
  init, update = optimizer.accumulate(inner, every)
  params = {'w': jnp.array([0.5, 0.25])}
  state, seen = init(params), []
  for grad, count in zip(grads, tokens, strict=True):
    updates, state = jax.jit(update)({'w': grad}, state, params, count)
    params = optax.apply_updates(params, updates)
    seen.append(params['w'])
  return seen, state


def test_accumulated_segments_are_one_segment():
  seen, _ = accumulated(optax.sgd(1.0), GRADS, TOKENS, every=3)
  np.testing.assert_array_equal(seen[0], [0.5, 0.25])
  np.testing.assert_array_equal(seen[1], [0.5, 0.25])
  # (3 * 1 + 1 * 4) / 4 = 1.75 and (3 * -2 + 1 * 1) / 4 = -1.25
  np.testing.assert_allclose(seen[2], [0.5 - 1.75, 0.25 + 1.25])


@pytest.mark.parametrize(
  'inner',
  [optax.adamw(0.1), optax.lion(0.1), optax.adafactor(0.1, momentum=0.9)],
  ids=['adamw', 'lion', 'adafactor'],
)
def test_two_updates_equal_two_of_the_inner_optimizer(inner):
  seen, state = accumulated(inner, GRADS[:2] * 2, [3, 1] * 2, every=2)
  plain, _ = accumulated(inner, [jnp.array([1.75, -1.25])] * 2, [4, 4], every=1)
  np.testing.assert_allclose(seen[1], plain[0], rtol=1e-6)
  np.testing.assert_allclose(seen[3], plain[1], rtol=1e-6)
  assert state.steps == 0
  assert state.tokens == 0
  assert not np.any(state.gradients['w'])


def test_steps_without_a_token_give_a_zero_gradient():
  seen, _ = accumulated(optax.sgd(1.0), GRADS[:2], [0, 0], every=2)
  np.testing.assert_array_equal(seen[1], [0.5, 0.25])


def test_sums_are_float32_and_updates_have_the_parameters_dtype():
  init, update = optimizer.accumulate(optax.sgd(1.0), 2)
  params = {'w': jnp.ones(2, jnp.bfloat16)}
  updates, state = update(params, init(params), params, 5)
  assert state.gradients['w'].dtype == jnp.float32
  assert updates['w'].dtype == jnp.bfloat16
