"""Losses against slow forms in float64, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.metrics import losses

B, T, V = 3, 5, 7
RNG = np.random.default_rng(0)
LOGITS = (RNG.normal(size=(B, T, V)) * 3).astype(np.float32)
TARGETS = RNG.integers(V, size=(B, T))
MASK = RNG.random((B, T)) < 0.6


def slow(logits_BTV, z_loss=0.0, label_smoothing=0.0):
  nats_BT = np.zeros(TARGETS.shape)
  for b, t in np.ndindex(TARGETS.shape):
    exps_V = np.exp(logits_BTV[b, t].astype(np.float64))
    wanted_V = np.full(V, label_smoothing / V)
    wanted_V[TARGETS[b, t]] += 1 - label_smoothing
    nats_BT[b, t] = -wanted_V @ np.log(exps_V / exps_V.sum())
    nats_BT[b, t] += z_loss * np.log(exps_V.sum()) ** 2
  return nats_BT


def test_cross_entropy_by_hand():
  """A target outside the vocabulary is NaN."""
  logits_BTV = jnp.log(jnp.array([[[1.0, 2.0, 5.0]]]))
  for target, nats in (1, 1.3862944), (-1, np.nan), (3, np.nan):  # ln 4
    found = losses.cross_entropy(logits_BTV, jnp.array([[target]]))
    np.testing.assert_allclose(found, [[nats]], rtol=1e-6)


def test_correct_is_argmax():
  """Of equal logits the first wins; NaN and unknown targets are wrong."""
  rng = np.random.default_rng(1)
  logits_BTV = rng.integers(4, size=(40, T, V)).astype(np.float32)
  targets_BT = rng.integers(V, size=(40, T))
  found_BT = losses.correct(logits_BTV, targets_BT)
  np.testing.assert_array_equal(found_BT, logits_BTV.argmax(-1) == targets_BT)
  assert found_BT.any() and not found_BT.all()
  assert not losses.correct(jnp.full((1, 1, V), jnp.nan), jnp.zeros((1, 1)))
  assert not losses.correct(jnp.zeros((1, 2, V)), jnp.array([[-1, V]])).any()


@pytest.mark.parametrize('weights', [(0, 0), (0.3, 0), (0, 0.2)])
def test_objective_is_the_slow_form(weights):
  found = losses.objective(LOGITS, TARGETS, *weights)
  np.testing.assert_allclose(found, slow(LOGITS, *weights), rtol=1e-5)
  if not any(weights):
    nats_BT = losses.cross_entropy(LOGITS, TARGETS)
    np.testing.assert_array_equal(nats_BT, found)


def test_gradient_is_softmax_minus_one_hot():
  grad_BTV = jax.grad(
    lambda x: losses.masked_mean(losses.objective(x, TARGETS), MASK)
  )(LOGITS)
  exps_BTV = np.exp(LOGITS.astype(np.float64))
  wanted_BTV = exps_BTV / exps_BTV.sum(-1, keepdims=True)
  wanted_BTV -= np.eye(V)[TARGETS]
  wanted_BTV *= MASK[..., None] / MASK.sum()
  np.testing.assert_allclose(grad_BTV, wanted_BTV, atol=1e-6)


def test_gradient_of_extras_is_the_difference_quotient():
  grad_BTV = jax.grad(lambda x: losses.objective(x, TARGETS, 0.1, 0.3).sum())(
    LOGITS
  )
  step_BTV = np.zeros((B, T, V))
  step_BTV[1, 2, 3] = 1e-4
  up = slow(LOGITS + step_BTV, 0.1, 0.3).sum()
  down = slow(LOGITS - step_BTV, 0.1, 0.3).sum()
  assert grad_BTV[1, 2, 3] == pytest.approx((up - down) / 2e-4, rel=1e-4)


def test_huge_logits_and_bfloat16_stay_finite():
  logits_BTV = jnp.array([[[3e38, -3e38, 0.0]]], jnp.bfloat16)
  nats_BT = losses.cross_entropy(logits_BTV, jnp.array([[0]]))
  assert nats_BT.dtype == jnp.float32
  assert nats_BT[0, 0] == 0


def test_padding_has_no_influence():
  nats_BT = slow(LOGITS)
  spoilt_BT = np.where(MASK, nats_BT, np.nan)
  mean = losses.masked_mean(spoilt_BT, MASK)
  assert mean == pytest.approx(nats_BT[MASK].mean())


def test_the_mean_of_no_token_is_zero_with_zero_gradients():
  none_BT = jnp.zeros_like(MASK)
  value, grad_BTV = jax.value_and_grad(
    lambda x: losses.masked_mean(losses.objective(x, TARGETS), none_BT)
  )(LOGITS)
  assert value == 0
  assert not np.any(grad_BTV)


@pytest.mark.parametrize(
  ('name', 'value'), [('z_loss', -1.0), ('label_smoothing', 1.0)]
)
def test_settings_out_of_range(name, value):
  with pytest.raises(ValueError, match=name):
    losses.objective(LOGITS, TARGETS, **{name: value})
