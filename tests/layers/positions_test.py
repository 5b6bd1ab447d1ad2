"""Positions: T5's buckets, rotations, slopes, and decay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.kernels.reference import NEVER
from meliad_rec.layers import positions
from meliad_rec.layers.positions import AdaptiveSpan
from meliad_rec.layers.positions import inward

H, W, K = 3, 150, 6


def test_t5_buckets():
  bucket = positions.t5_bucket(np.arange(600), 32, 128)
  np.testing.assert_array_equal(bucket[:16], np.arange(16))
  assert (np.diff(bucket) >= 0).all()
  assert set(bucket) == set(range(32))
  assert bucket[112] == 30
  assert bucket[113] == 31
  assert bucket[16] == 16


def test_t5_bias_is_the_table_at_the_bucket():
  module = positions.T5Bias(H, buckets=8, max_distance=40)
  back_W = np.arange(3, W)
  params = module.init(jax.random.key(0), back_W, method='bias')
  bias_HW = module.apply(params, back_W, method='bias')
  table_HN = params['params']['table']
  assert table_HN.shape == (H, 8)
  for i, back in enumerate(back_W):
    bucket = positions.t5_bucket(np.array([back]), 8, 40)[0]
    np.testing.assert_allclose(bias_HW[:, i], table_HN[:, bucket], rtol=1e-6)


def test_t5_table_starts_at_one_over_the_root_of_the_buckets():
  module = positions.T5Bias(200)
  params = module.init(jax.random.key(0), np.arange(2), method='bias')
  np.testing.assert_allclose(params['params']['table'].std(), 0.177, rtol=0.05)


def test_alibi_slopes_of_eight_heads_halve():
  bias_HW = positions.ALiBi(8).apply({}, np.arange(4), method='bias')
  np.testing.assert_allclose(
    bias_HW, -(2.0 ** -np.arange(1, 9))[:, None] * np.arange(4)
  )


def rotated(x_SK, first):
  x_BSHK = jnp.asarray(x_SK)[None, :, None]
  y = positions.RoPE(1).apply({}, x_BSHK, first, method='rotate')
  return np.asarray(y[0, :, 0])


def test_rope_turns_each_pair_by_its_own_angle():
  x_SK = np.random.default_rng(0).normal(size=(4, K)).astype(np.float32)
  y_SK = rotated(x_SK, first=5)
  for s, i in np.ndindex(4, K // 2):
    angle = (5 + s) * 10_000.0 ** (-2 * i / K)
    pair = complex(x_SK[s, i], x_SK[s, i + K // 2]) * np.exp(1j * angle)
    found = complex(y_SK[s, i], y_SK[s, i + K // 2])
    assert abs(pair - found) < 1e-5


def test_rope_logits_depend_on_distance_alone():
  rng = np.random.default_rng(0)
  q, k = rng.normal(size=(2, 4, K)).astype(np.float32)
  logits = [rotated(q, at) @ rotated(k, at - 3).T for at in (0, 40)]
  np.testing.assert_allclose(*logits, atol=1e-4)
  moved = rotated(q, 0) @ rotated(k, -4).T
  assert np.abs(moved - logits[0]).max() > 0.1


def test_rope_needs_pairs():
  with pytest.raises(ValueError, match='HEAD_DIM'):
    rotated(np.zeros((2, 5), np.float32), 0)


def xpos(x_SK, first, method, kind=positions.XPos):
  x_BSHK = jnp.asarray(x_SK)[None, :, None]
  y = kind(1).apply({}, x_BSHK, first, method=method)
  return np.asarray(y[0, :, 0])


@pytest.mark.parametrize('kind', [positions.XPos, positions.SymmetricXPos])
def test_xpos_turns_and_scales_each_pair(kind):
  """Sun et al. 2022: queries by zeta^(n / 512), keys by its inverse."""
  x_SK = np.random.default_rng(0).normal(size=(4, K)).astype(np.float32)
  for method, sign in (('rotate', 1), ('rotate_keys', -1)):
    y_SK = xpos(x_SK, 300, method, kind)
    for s, i in np.ndindex(4, K // 2):
      n = 300 + s
      zeta = (2 * i + 0.4 * K) / (1.4 * K)
      factor = np.exp(1j * n * 10_000.0 ** (-2 * i / K))
      factor *= zeta ** (sign * n / 512)
      pair = complex(x_SK[s, i], x_SK[s, i + K // 2]) * factor
      assert abs(pair - complex(y_SK[s, i], y_SK[s, i + K // 2])) < 1e-4


def test_xpos_logits_depend_on_distance_alone():
  rng = np.random.default_rng(0)
  q, k = rng.normal(size=(2, 4, K)).astype(np.float32)
  logits = [
    xpos(q, at, 'rotate') @ xpos(k, at - 300, 'rotate_keys').T
    for at in (0, 400, -700)
  ]
  np.testing.assert_allclose(logits[0], logits[1], atol=1e-3)
  np.testing.assert_allclose(logits[0], logits[2], atol=1e-3)
  nearer = xpos(q, 0, 'rotate') @ xpos(k, -3, 'rotate_keys').T
  assert np.abs(nearer - logits[0]).max() > 0.1


@pytest.mark.parametrize(
  'tokens, growth', [(100, 1.277), (1000, 11.55), (4096, 22519)]
)
def test_keys_behind_a_query_grow(tokens, growth):
  """The docstring's numbers are those of the fastest pairs."""
  size = lambda x_1K, first, method: np.linalg.norm(xpos(x_1K, first, method))
  for i in range(K // 2):
    one = np.eye(1, K, i, dtype=np.float32)
    ahead = size(one, 0, 'rotate') * size(one, tokens, 'rotate_keys')
    if i == 0:
      np.testing.assert_allclose(ahead, growth, rtol=1e-3)
    else:
      assert 1 < ahead < growth
    # And those in front of it shrink as much.
    past = size(one, tokens, 'rotate') * size(one, 0, 'rotate_keys')
    np.testing.assert_allclose(past, 1 / ahead, rtol=1e-4)


def test_xpos_of_bfloat16_is_computed_in_float32():
  """An angle of 1,001 in bfloat16 would be off by more than 1."""
  x_SK = jax.random.normal(jax.random.key(0), (4, K)).astype(jnp.bfloat16)
  low = xpos(x_SK, 1001, 'rotate')
  assert low.dtype == jnp.bfloat16
  expected = xpos(x_SK.astype(jnp.float32), 1001, 'rotate')
  np.testing.assert_allclose(low.astype(np.float32), expected, atol=0.01)


def test_relative_keys_are_a_vector_a_distance_of_unit_variance():
  module = positions.RelativeKeys(H)
  back_W = np.arange(W) + 1
  params = module.init(jax.random.key(0), back_W, K, method='keys')
  keys_WK = module.apply(params, back_W, K, method='keys')
  assert keys_WK.shape == (W, K)
  np.testing.assert_allclose(keys_WK.std(), 1, rtol=0.05)
  assert (module.apply(params, back_W, method='bias') == 0).all()


@pytest.mark.parametrize(
  'kind', ['NoPosition', 'ALiBi', 'RoPE', 'XPos', 'T5Bias']
)
def test_other_positions_add_nothing_to_keys(kind):
  module = getattr(positions, kind)(H)
  added, _ = module.init_with_output(
    jax.random.key(0), np.arange(W), K, method='keys'
  )
  assert added is None


SPAN_H, SPAN_W, R = 5, 40, 8
MODULE = AdaptiveSpan(SPAN_H, ramp=R, penalty=0.5)
RATIO_H = np.array([0.0, 0.13, 0.61, 0.97, 1.0], np.float32)


def bias(ratio_H, **options):
  params = {'params': {'ratio': jnp.asarray(ratio_H)}}
  return MODULE.apply(params, SPAN_W, method='bias', **options)


@pytest.mark.parametrize('changes', [{'ramp': 0}, {'penalty': -1.0}])
def test_ramps_and_penalties_that_cannot_be(changes):
  with pytest.raises(ValueError, match='AdaptiveSpan.ramp'):
    MODULE.clone(**changes).init(jax.random.key(0), SPAN_W, method='bias')


def test_it_is_the_logarithm_of_the_mask():
  bias_HW = np.asarray(bias(RATIO_H))
  for h, x in np.ndindex(SPAN_H, SPAN_W):
    m = min(max((RATIO_H[h] * SPAN_W - x) / R + 1, 0), 1)
    if m:
      np.testing.assert_allclose(bias_HW[h, x], np.log(m), rtol=1e-4, atol=1e-5)
    else:
      assert bias_HW[h, x] == np.float32(NEVER)


def test_it_is_masking_probabilities_and_renormalising():
  rng = np.random.default_rng(0)
  logits_HW, value_HW = rng.normal(size=(2, SPAN_H, SPAN_W))

  def masked(ratio_H):
    m_HW = jnp.clip(
      (ratio_H[:, None] * SPAN_W - jnp.arange(SPAN_W)) / R + 1, 0, 1
    )
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
    p_HW = jax.nn.softmax(bias(jnp.full(SPAN_H, ratio)))
    return jnp.sum(p_HW * jnp.arange(SPAN_W))

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
  goal_H = np.asarray(seen(np.full(SPAN_H, wanted)))

  def loss(ratio_H):
    _, sown = bias(ratio_H, mutable='losses')
    penalty = sown['losses']['span']
    return jnp.sum((seen(ratio_H) - goal_H) ** 2) / SPAN_W**2 + 1e-4 * penalty

  ratio_H = jnp.array([-0.3, 0.0, 0.5, 1.0, 1.3])
  # By the signs of gradients, nearly as Adam.
  step = jax.jit(lambda r: r - 0.02 * jnp.sign(jax.grad(loss)(r)))
  for _ in range(80):
    ratio_H = step(ratio_H)
  np.testing.assert_allclose(inward(ratio_H), wanted, atol=0.05)


@pytest.mark.parametrize('method', ['bias', 'penalize'])
def test_its_loss_is_the_mean_span_where_losses_are_wanted(method):
  params = {'params': {'ratio': RATIO_H}}
  _, sown = MODULE.apply(params, SPAN_W, method=method, mutable='losses')
  loss = sown['losses']['span']
  np.testing.assert_allclose(loss, 0.5 * SPAN_W * RATIO_H.mean(), rtol=1e-6)
  assert bias(RATIO_H).shape == (SPAN_H, SPAN_W)  # No second output.


def test_new_spans_are_zero_and_nothing_is_sown():
  variables = MODULE.init(jax.random.key(0), SPAN_W, method='bias')
  assert list(variables) == ['params']
  np.testing.assert_array_equal(variables['params']['ratio'], np.zeros(SPAN_H))
