"""Positions: T5's buckets, rotations, slopes, and spans.

attend_test.py compares the logits of encoders' positions with their papers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.kernels.reference import MASKED
from meliad_rec.layers import positions
from tests.cells import draw

H, W, K = 3, 150, 6


def test_sinusoids():
  """Equation of Vaswani et al. 2017, with cosines after sines."""
  found_TD = positions.sinusoids(600, 8)
  t_T1 = np.arange(600)[:, None]
  angle_TF = t_T1 / 10_000.0 ** (np.arange(4) / 3)
  expected_TD = np.hstack([np.sin(angle_TF), np.cos(angle_TF)])
  np.testing.assert_allclose(found_TD, expected_TD, atol=1e-6)
  assert found_TD.dtype == np.float32
  with pytest.raises(ValueError, match='D_MODEL'):
    positions.sinusoids(3, 7)


def test_t5_buckets():
  bucket = positions.t5_bucket(np.arange(600), 32, 128)
  np.testing.assert_array_equal(bucket[:16], np.arange(16))
  assert (np.diff(bucket) >= 0).all()
  assert set(bucket) == set(range(32))
  assert bucket[112] == 30
  assert bucket[113] == 31
  assert bucket[16] == 16


def test_t5_begins_as_the_mean_of_alibi_in_each_bucket():
  module, back_W = positions.T5Bias(8), np.arange(128)
  found_HW, params = module.init_with_output(
    jax.random.key(0), back_W, method='bias'
  )
  alibi_HW = positions.ALiBi(8).apply({}, back_W, method='bias')
  np.testing.assert_allclose(found_HW[:, :16], alibi_HW[:, :16], atol=1e-6)
  bucket_W = positions.t5_bucket(back_W, 32, 128)
  for bucket in range(32):
    mean_H = alibi_HW[:, bucket_W == bucket].mean(1)
    table_H = params['params']['table'][:, bucket]
    np.testing.assert_allclose(table_H, mean_H, rtol=1e-5)
  with pytest.raises(ValueError, match='T5Bias.start'):
    module.clone(start='zeros').init(jax.random.key(0), back_W, method='bias')
  for buckets in 1, 256:
    with pytest.raises(ValueError, match='buckets must be from 2 to 255'):
      module.clone(buckets=buckets).init(
        jax.random.key(0), back_W, method='bias'
      )


def test_xpos_is_limited_to_finite_numbers():
  rotate = lambda S: positions.XPos(1).apply(
    {}, jnp.ones((1, S, 1, 8)), 0, method='rotate_keys'
  )
  assert np.isfinite(rotate(64 * 512)).all()
  with pytest.raises(ValueError, match='32,768 tokens'):
    rotate(64 * 512 + 1)


def test_t5_bias_is_the_table_at_the_bucket():
  module = positions.T5Bias(200, 8, max_distance=40, start='normal')
  back_W = np.arange(3, W)
  bias_HW, params = module.init_with_output(
    jax.random.key(0), back_W, method='bias'
  )
  table_HN = params['params']['table']
  assert table_HN.shape == (200, 8)
  np.testing.assert_allclose(table_HN.std(), 8**-0.5, rtol=0.05)
  expected = table_HN[:, positions.t5_bucket(back_W, 8, 40)]
  np.testing.assert_allclose(bias_HW, expected, rtol=1e-6)


def test_t5_bias_is_not_rounded_on_accelerators():
  """By default, a TPU multiplies float32 numbers as bfloat16."""
  module = positions.T5Bias(4)
  params = module.init(jax.random.key(0), np.arange(9), method='bias')
  bias = lambda p: module.apply(p, np.arange(9), method='bias')
  program = jax.jit(jax.grad(lambda p: jnp.sum(bias(p) ** 2))).lower(params)
  products = [
    line for line in program.as_text().splitlines() if 'dot_general' in line
  ]
  assert len(products) == 2
  assert all('precision = [HIGHEST, HIGHEST]' in line for line in products)


def test_alibi_slopes_of_eight_heads_halve():
  bias_HW = positions.ALiBi(8).apply({}, np.arange(4), method='bias')
  np.testing.assert_allclose(
    bias_HW, -(2.0 ** -np.arange(1, 9))[:, None] * np.arange(4)
  )


def rotated(kind, x_SK, first):
  x_BSHK = jnp.asarray(x_SK)[None, :, None]
  y = kind(1).apply({}, x_BSHK, first, method='rotate')
  return np.asarray(y[0, :, 0])


def test_rope_turns_each_pair_by_its_own_angle():
  x_SK = draw(4, K)
  y_SK = rotated(positions.RoPE, x_SK, first=5)
  for s, i in np.ndindex(4, K // 2):
    angle = (5 + s) * 10_000.0 ** (-2 * i / K)
    pair = complex(x_SK[s, i], x_SK[s, i + K // 2]) * np.exp(1j * angle)
    found = complex(y_SK[s, i], y_SK[s, i + K // 2])
    assert abs(pair - found) < 1e-5


def test_rope_needs_pairs():
  with pytest.raises(ValueError, match='HEAD_DIM'):
    rotated(positions.RoPE, np.zeros((2, 5), np.float32), 0)


def test_xpos_of_bfloat16_is_computed_in_float32():
  """An angle of 1,001 in bfloat16 would be off by more than 1."""
  x_SK = draw(4, K).astype('bfloat16')
  low = rotated(positions.XPos, x_SK, 1001)
  assert low.dtype == jnp.bfloat16
  expected = rotated(positions.XPos, x_SK.astype(np.float32), 1001)
  np.testing.assert_allclose(low.astype(np.float32), expected, atol=0.01)


def test_relative_keys_are_a_vector_a_distance_of_unit_variance():
  module = positions.RelativeKeys(H)
  back_W = np.arange(W) + 1
  keys_WK, params = module.init_with_output(
    jax.random.key(0), back_W, K, method='keys'
  )
  assert keys_WK.shape == (W, K)
  np.testing.assert_allclose(keys_WK.std(), 1, rtol=0.05)
  assert (module.apply(params, back_W, method='bias') == 0).all()


SPAN_H, SPAN_W, R = 5, 40, 8
MODULE = positions.AdaptiveSpan(SPAN_H, ramp=R, penalty=0.5)
RATIO_H = np.array([0.0, 0.13, 0.61, 0.97, 1.0], np.float32)


def bias(ratio_H, **options):
  params = {'params': {'ratio': jnp.asarray(ratio_H)}}
  return MODULE.apply(params, SPAN_W, method='bias', **options)


@pytest.mark.parametrize('changes', [{'ramp': 0}, {'penalty': -1.0}])
def test_ramps_and_penalties_that_cannot_be(changes):
  with pytest.raises(ValueError, match='AdaptiveSpan.ramp'):
    MODULE.clone(**changes).init(jax.random.key(0), SPAN_W, method='bias')


def weights(ratio_H):
  """Returns m by distance, by definition."""
  spans_H1, back_W = ratio_H[:, None] * SPAN_W, jnp.arange(SPAN_W)
  return jnp.clip((spans_H1 - back_W) / R + 1, 0, 1)


def test_a_span_is_masking_probabilities_and_renormalising():
  rng = np.random.default_rng(0)
  logits_HW, value_HW = rng.normal(size=(2, SPAN_H, SPAN_W))

  def masked(ratio_H):
    p_HW = jax.nn.softmax(logits_HW) * weights(ratio_H)
    return p_HW / p_HW.sum(-1, keepdims=True)

  def biased(ratio_H):
    return jax.nn.softmax(logits_HW + bias(ratio_H))

  hidden = bias(RATIO_H) == np.float32(MASKED)
  np.testing.assert_array_equal(hidden, weights(RATIO_H) == 0)
  np.testing.assert_allclose(biased(RATIO_H), masked(RATIO_H), atol=1e-6)
  ratio_H = RATIO_H.clip(0.02, 0.98)  # The two clip differently at the ends.
  found, expected = (
    jax.jit(jax.grad(lambda r, f=f: jnp.sum(f(r) * value_HW)))(ratio_H)
    for f in (biased, masked)
  )
  np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
  assert np.abs(found[:3]).min() > 1e-3


def test_gradients_are_finite_wherever_the_span_is():
  ratio_N = np.linspace(-0.5, 1.5, 201).astype(np.float32)

  def total(ratio):
    p_HW = jax.nn.softmax(bias(jnp.full(SPAN_H, ratio)))
    return jnp.sum(p_HW * jnp.arange(SPAN_W))

  assert np.isfinite(jax.jit(jax.vmap(jax.grad(total)))(ratio_N)).all()


def test_a_span_is_clipped_and_its_gradient_is_not():
  z = np.array([-0.1, 0.0, 0.4, 1.0, 1.3], np.float32)
  value, pull = jax.vjp(positions.clipped, z)
  np.testing.assert_allclose(value, z.clip(0, 1), atol=1e-6)
  np.testing.assert_array_equal(pull(z)[0], z)


def test_descent_reaches_every_span_from_outside():
  seen = lambda ratio_H: jnp.exp(bias(ratio_H)).sum(-1)

  def loss(ratio_H, goal_H):
    _, sown = bias(ratio_H, mutable='losses')
    penalty = sown['losses']['span']
    return jnp.sum((seen(ratio_H) - goal_H) ** 2) / SPAN_W**2 + 1e-4 * penalty

  @jax.jit
  def descend(goal_H):
    def step(_, ratio_H):
      # By the signs of gradients, nearly as Adam.
      ratio_H = ratio_H - 0.02 * jnp.sign(jax.grad(loss)(ratio_H, goal_H))
      params = {'span': {'ratio': ratio_H}}
      return positions.clip_spans(params)['span']['ratio']

    first_H = jnp.array([-0.3, 0.0, 0.5, 1.0, 1.3])
    return jax.lax.fori_loop(0, 80, step, first_H)

  for wanted in 0.0, 0.4, 1.0:
    goal_H = seen(np.full(SPAN_H, wanted))
    np.testing.assert_allclose(descend(goal_H), wanted, atol=0.05)


@pytest.mark.parametrize('method', ['bias', 'penalize'])
def test_its_loss_is_the_mean_span_where_losses_are_wanted(method):
  params = {'params': {'ratio': RATIO_H}}
  _, sown = MODULE.apply(params, SPAN_W, method=method, mutable='losses')
  loss = sown['losses']['span']
  np.testing.assert_allclose(loss, 0.5 * SPAN_W * RATIO_H.mean(), rtol=1e-6)
  new = MODULE.init(jax.random.key(0), SPAN_W, method=method)
  assert list(new) == ['params']  # No loss.
  np.testing.assert_array_equal(new['params']['ratio'], np.zeros(SPAN_H))
