"""Losses against slow forms in float64, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.metrics import losses

B, T, V = 3, 5, 7


@pytest.fixture
def example():
  rng = np.random.default_rng(0)
  logits_BTV = rng.normal(size=(B, T, V)) * 3
  targets_BT = rng.integers(V, size=(B, T))
  mask_BT = rng.random((B, T)) < 0.6
  return logits_BTV.astype(np.float32), targets_BT, mask_BT


def slow(logits_BTV, targets_BT, z_loss=0.0, label_smoothing=0.0):
  nats_BT = np.zeros(targets_BT.shape)
  for b, t in np.ndindex(targets_BT.shape):
    exps_V = np.exp(logits_BTV[b, t].astype(np.float64))
    wanted_V = np.full(V, label_smoothing / V)
    wanted_V[targets_BT[b, t]] += 1 - label_smoothing
    nats_BT[b, t] = -wanted_V @ np.log(exps_V / exps_V.sum())
    nats_BT[b, t] += z_loss * np.log(exps_V.sum()) ** 2
  return nats_BT


def test_cross_entropy_is_the_slow_form(example):
  logits_BTV, targets_BT, _ = example
  np.testing.assert_allclose(
    losses.cross_entropy(logits_BTV, targets_BT),
    slow(logits_BTV, targets_BT),
    rtol=1e-5,
  )


def test_by_hand():
  logits_BTV = jnp.log(jnp.array([[[1.0, 2.0, 5.0]]]))
  nats_BT = losses.cross_entropy(logits_BTV, jnp.array([[1]]))
  assert nats_BT[0, 0] == pytest.approx(1.3862944)  # ln 4


@pytest.mark.parametrize('z_loss, label_smoothing', [(0.3, 0), (0, 0.2)])
def test_objective_is_the_slow_form(example, z_loss, label_smoothing):
  logits_BTV, targets_BT, _ = example
  np.testing.assert_allclose(
    losses.objective(logits_BTV, targets_BT, z_loss, label_smoothing),
    slow(logits_BTV, targets_BT, z_loss, label_smoothing),
    rtol=1e-5,
  )


def test_gradient_is_softmax_minus_one_hot(example):
  logits_BTV, targets_BT, mask_BT = example
  grad_BTV = jax.grad(
    lambda x: losses.masked_mean(losses.objective(x, targets_BT), mask_BT)
  )(logits_BTV)
  exps_BTV = np.exp(logits_BTV.astype(np.float64))
  wanted_BTV = exps_BTV / exps_BTV.sum(-1, keepdims=True)
  wanted_BTV -= np.eye(V)[targets_BT]
  wanted_BTV *= mask_BT[..., None] / mask_BT.sum()
  np.testing.assert_allclose(grad_BTV, wanted_BTV, atol=1e-6)


def test_gradient_of_extras_is_the_difference_quotient(example):
  logits_BTV, targets_BT, _ = example
  grad_BTV = jax.grad(
    lambda x: losses.objective(x, targets_BT, 0.1, 0.3).sum()
  )(logits_BTV)
  step_BTV = np.zeros((B, T, V))
  step_BTV[1, 2, 3] = 1e-4
  up = slow(logits_BTV + step_BTV, targets_BT, 0.1, 0.3).sum()
  down = slow(logits_BTV - step_BTV, targets_BT, 0.1, 0.3).sum()
  assert grad_BTV[1, 2, 3] == pytest.approx((up - down) / 2e-4, rel=1e-4)


def test_huge_logits_and_bfloat16_stay_finite():
  logits_BTV = jnp.array([[[3e38, -3e38, 0.0]]], jnp.bfloat16)
  nats_BT = losses.cross_entropy(logits_BTV, jnp.array([[0]]))
  assert nats_BT.dtype == jnp.float32
  assert nats_BT[0, 0] == 0


@pytest.mark.parametrize('target', [-1, V])
def test_a_target_outside_the_vocabulary_is_nan(target):
  nats_BT = losses.cross_entropy(jnp.zeros((1, 1, V)), jnp.array([[target]]))
  assert np.isnan(nats_BT[0, 0])


def test_padding_has_no_influence(example):
  logits_BTV, targets_BT, mask_BT = example
  nats_BT = losses.cross_entropy(logits_BTV, targets_BT)
  spoilt_BT = np.where(mask_BT, nats_BT, np.nan)
  mean = np.asarray(nats_BT)[mask_BT].mean()
  assert losses.masked_mean(spoilt_BT, mask_BT) == pytest.approx(mean)


def test_the_mean_of_no_token_is_zero_with_zero_gradients(example):
  logits_BTV, targets_BT, mask_BT = example
  value, grad_BTV = jax.value_and_grad(
    lambda x: losses.masked_mean(
      losses.objective(x, targets_BT), jnp.zeros_like(mask_BT)
    )
  )(logits_BTV)
  assert value == 0
  assert not np.any(grad_BTV)


def test_correct():
  logits_BTV = jnp.array([[[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]]])
  assert losses.correct(logits_BTV, jnp.array([[1, 1]])).tolist() == [
    [True, False]
  ]


@pytest.mark.parametrize(
  'settings, named',
  [
    ({'z_loss': -1.0}, 'z_loss'),
    ({'label_smoothing': 1.0}, 'label_smoothing'),
  ],
)
def test_settings_out_of_range(settings, named):
  with pytest.raises(ValueError, match=named):
    losses.objective(jnp.zeros((1, 1, V)), jnp.array([[0]]), **settings)
