"""Adaptive spans: the mask, its ends, and its loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.kernels.reference import NEVER
from meliad_rec.layers.positions import AdaptiveSpan
from meliad_rec.layers.positions import inward

H, W, R = 5, 40, 8
MODULE = AdaptiveSpan(H, ramp=R, penalty=0.5)
RATIO_H = np.array([0.0, 0.13, 0.61, 0.97, 1.0], np.float32)


def bias(ratio_H, **options):
  params = {'params': {'ratio': jnp.asarray(ratio_H)}}
  return MODULE.apply(params, W, method='bias', **options)


@pytest.mark.parametrize('changes', [{'ramp': 0}, {'penalty': -1.0}])
def test_ramps_and_penalties_that_cannot_be(changes):
  with pytest.raises(ValueError, match='set span.AdaptiveSpan.ramp to 1 or mo'):
    MODULE.clone(**changes).init(jax.random.key(0), W, method='bias')


def test_it_is_the_logarithm_of_the_mask():
  bias_HW = np.asarray(bias(RATIO_H))
  for h, x in np.ndindex(H, W):
    m = min(max((RATIO_H[h] * W - x) / R + 1, 0), 1)
    if m:
      np.testing.assert_allclose(bias_HW[h, x], np.log(m), rtol=1e-4, atol=1e-5)
    else:
      assert bias_HW[h, x] == np.float32(NEVER)


def test_it_is_masking_probabilities_and_renormalising():
  rng = np.random.default_rng(0)
  logits_HW, value_HW = rng.normal(size=(2, H, W))

  def masked(ratio_H):
    m_HW = jnp.clip((ratio_H[:, None] * W - jnp.arange(W)) / R + 1, 0, 1)
    p_HW = jax.nn.softmax(logits_HW) * m_HW
    return p_HW / p_HW.sum(-1, keepdims=True)

  def biased(ratio_H):
    return jax.nn.softmax(logits_HW + bias(ratio_H))

  ratio_H = RATIO_H.clip(0.02, 0.98)  # The two clip differently at the ends.
  np.testing.assert_allclose(biased(ratio_H), masked(ratio_H), atol=1e-6)
  found, expected = (
    jax.jit(jax.grad(lambda r, f=f: jnp.sum(f(r) * value_HW)))(ratio_H)
    for f in (biased, masked)
  )
  np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
  assert np.abs(found[:3]).min() > 1e-3


def test_gradients_are_finite_wherever_the_span_is():
  ratio_N = np.linspace(-0.5, 1.5, 201).astype(np.float32)

  def total(ratio):
    p_HW = jax.nn.softmax(bias(jnp.full(H, ratio)))
    return jnp.sum(p_HW * jnp.arange(W))

  assert np.isfinite(jax.jit(jax.vmap(jax.grad(total)))(ratio_N)).all()


@pytest.mark.parametrize(
  'z, clipped, passes',
  [
    (-0.1, 0, [-1, 0]),
    (0.0, 0, [-1, 1]),
    (0.3, 0.3, [-1, 1]),
    (1.0, 1, [-1, 1]),
    (1.1, 1, [0, 1]),
  ],
)
def test_outside_only_gradients_that_lead_back_pass(z, clipped, passes):
  value, pull = jax.vjp(inward, jnp.float32(z))
  np.testing.assert_allclose(value, clipped)
  assert [pull(jnp.float32(g))[0] for g in (-1, 1)] == passes


@pytest.mark.parametrize('wanted', [0.0, 0.4, 1.0])
def test_descent_reaches_every_span_from_outside(wanted):
  seen = lambda ratio_H: jnp.exp(bias(ratio_H)).sum(-1)
  goal_H = np.asarray(seen(np.full(H, wanted)))

  def loss(ratio_H):
    _, sown = bias(ratio_H, mutable='losses')
    penalty = sown['losses']['span']
    return jnp.sum((seen(ratio_H) - goal_H) ** 2) / W**2 + 1e-4 * penalty

  ratio_H = jnp.array([-0.3, 0.0, 0.5, 1.0, 1.3])
  # By the signs of gradients, nearly as Adam.
  step = jax.jit(lambda r: r - 0.02 * jnp.sign(jax.grad(loss)(r)))
  for _ in range(80):
    ratio_H = step(ratio_H)
  np.testing.assert_allclose(inward(ratio_H), wanted, atol=0.05)


@pytest.mark.parametrize('method', ['bias', 'penalise'])
def test_its_loss_is_the_mean_span_where_losses_are_wanted(method):
  params = {'params': {'ratio': RATIO_H}}
  _, sown = MODULE.apply(params, W, method=method, mutable='losses')
  loss = sown['losses']['span']
  np.testing.assert_allclose(loss, 0.5 * W * RATIO_H.mean(), rtol=1e-6)
  assert bias(RATIO_H).shape == (H, W)  # No second output.


def test_new_spans_are_zero_and_nothing_is_sown():
  variables = MODULE.init(jax.random.key(0), W, method='bias')
  assert list(variables) == ['params']
  np.testing.assert_array_equal(variables['params']['ratio'], np.zeros(H))
