"""Positions: T5's buckets, rotations, slopes, and decay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.layers import positions

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


def test_no_position_changes_nothing():
  module = positions.NoPosition(H)
  x = jax.random.normal(jax.random.key(0), (2, 5, H, K))
  assert (module.apply({}, np.arange(4), method='bias') == 0).all()
  np.testing.assert_array_equal(module.apply({}, x, 7, method='rotate'), x)


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
  with pytest.raises(ValueError, match='width is 5. Set HEAD_DIM even'):
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
  """Those that turn fastest, as the docstring says; others less."""
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
  """An angle of 1,001 in bfloat16 is off by 1 and more."""
  x_SK = jax.random.normal(jax.random.key(0), (4, K)).astype(jnp.bfloat16)
  low = xpos(x_SK, 1001, 'rotate')
  assert low.dtype == jnp.bfloat16
  expected = xpos(x_SK.astype(jnp.float32), 1001, 'rotate')
  np.testing.assert_allclose(low.astype(np.float32), expected, atol=0.01)


def test_which_positions_have_two_sides():
  two = {k for k in vars(positions).values() if getattr(k, 'two_sided', False)}
  assert two == {positions.SymmetricXPos}


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
