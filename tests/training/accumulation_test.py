"""K segments accumulated are one segment of K times the tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meliad_rec.training import optimizer

GRADS = [jnp.array([1.0, -2.0]), jnp.array([4.0, 1.0]), jnp.array([7.0, 5.0])]
TOKENS = [3, 1, 0]


def steps(inner, grads, tokens, every):
  """Parameters after each step."""
  init, update = optimizer.accumulate(inner, every)
  params = {'w': jnp.array([0.5, 0.25])}
  state, seen = init(params), []
  for grad, count in zip(grads, tokens, strict=True):
    updates, state = jax.jit(update)({'w': grad}, state, params, count)
    params = optax.apply_updates(params, updates)
    seen.append(params['w'])
  return seen, state


def test_one_update_on_the_mean_over_tokens():
  seen, _ = steps(optax.sgd(1.0), GRADS, TOKENS, every=3)
  np.testing.assert_array_equal(seen[0], [0.5, 0.25])
  np.testing.assert_array_equal(seen[1], [0.5, 0.25])
  # (3 * 1 + 1 * 4) / 4 = 1.75 and (3 * -2 + 1 * 1) / 4 = -1.25
  np.testing.assert_allclose(seen[2], [0.5 - 1.75, 0.25 + 1.25])


@pytest.mark.parametrize(
  'inner',
  [optax.adamw(0.1), optax.lion(0.1), optax.adafactor(0.1, momentum=0.9)],
  ids=['adamw', 'lion', 'adafactor'],
)
def test_two_updates_equal_two_of_the_inner_optimiser(inner):
  seen, state = steps(inner, GRADS[:2] * 2, [3, 1] * 2, every=2)
  plain, _ = steps(inner, [jnp.array([1.75, -1.25])] * 2, [4, 4], every=1)
  np.testing.assert_allclose(seen[1], plain[0], rtol=1e-6)
  np.testing.assert_allclose(seen[3], plain[1], rtol=1e-6)
  assert state.steps == 0
  assert state.tokens == 0
  assert not np.any(state.gradients['w'])


def test_steps_without_a_token_give_a_zero_gradient():
  seen, _ = steps(optax.sgd(1.0), GRADS[:2], [0, 0], every=2)
  np.testing.assert_array_equal(seen[1], [0.5, 0.25])


def test_sums_are_float32_and_updates_have_the_parameters_dtype():
  init, update = optimizer.accumulate(optax.sgd(1.0), 2)
  params = {'w': jnp.ones(2, jnp.bfloat16)}
  updates, state = update(params, init(params), params, 5)
  assert state.gradients['w'].dtype == jnp.float32
  assert updates['w'].dtype == jnp.bfloat16
