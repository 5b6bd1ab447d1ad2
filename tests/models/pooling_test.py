"""Pools against loops over the tokens read so far, split or padded anywhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.models import pooling

B, T, D, S = 3, 11, 5, 4
RNG = np.random.default_rng(0)
Y = RNG.normal(size=(B, T, D)).astype(np.float32)
SLOTS = RNG.normal(size=(B, S, D)).astype(np.float32)
REAL = np.ones((B, T), bool)
# Row 0 ends early, row 1 has gaps and begins with one, row 2 is empty.
GAPS = REAL.copy()
GAPS[0, 7:] = False
GAPS[1, [0, 1, 4, 8]] = False
GAPS[2] = False
MASKS = {'real': REAL, 'gaps': GAPS}
POOLS = {
  'mean': (pooling.Mean(), lambda seen: seen.mean(0)),
  'first': (pooling.First(), lambda seen: seen[0]),
  'last': (pooling.Last(), lambda seen: seen[-1]),
}
every = pytest.mark.parametrize('name', POOLS)


def none():
  pytest.fail('the slots were asked for')


def whole(pool, y_BTD, mask_BT):
  return pool(pool.initial_state(B, D), y_BTD, mask_BT, none)


@every
@pytest.mark.parametrize('mask', MASKS)
def test_a_pool_is_of_what_was_read_so_far(name, mask):
  pool, of = POOLS[name]
  _, pooled_BTD = jax.jit(lambda y, m: whole(pool, y, m))(Y, MASKS[mask])
  assert pooled_BTD.shape == Y.shape
  assert pooled_BTD.dtype == jnp.float32
  for row, place in np.argwhere(MASKS[mask]):
    seen = Y[row, : place + 1][MASKS[mask][row, : place + 1]]
    close = np.testing.assert_allclose
    close(pooled_BTD[row, place], of(seen), rtol=1e-5, atol=1e-6)


@every
def test_padding_behind_the_end_leaves_the_last_vector(name):
  pool, of = POOLS[name]
  _, pooled_BTD = whole(pool, Y, GAPS)
  np.testing.assert_allclose(pooled_BTD[0, -1], of(Y[0, :7]), rtol=1e-5)
  np.testing.assert_array_equal(pooled_BTD[2], 0)


@every
@pytest.mark.parametrize('mask', MASKS)
@pytest.mark.parametrize('at', [1, 4, T - 1])
def test_it_may_be_split_anywhere(name, mask, at):
  pool, mask_BT = POOLS[name][0], MASKS[mask]
  end, expected = whole(pool, Y, mask_BT)
  middle, a = whole(pool, Y[:, :at], mask_BT[:, :at])
  state, b = pool(middle, Y[:, at:], mask_BT[:, at:], none)
  real_BT = mask_BT.copy()
  real_BT[:, -1] = True  # What is behind the end counts too.
  found, expected = np.concatenate([a, b], 1)[real_BT], expected[real_BT]
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
  close(found, expected)
  jax.tree.map(close, state, end)
  types = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
  assert types(middle) == types(pool.initial_state(B, D))


@every
def test_what_is_padding_has_no_influence_and_no_gradient(name):
  pool = POOLS[name][0]

  def loss(y_BTD):
    state, pooled_BTD = whole(pool, y_BTD, GAPS)
    return (pooled_BTD**2).sum() + (jax.tree.leaves(state)[0] ** 2).sum()

  value, gradient = jax.value_and_grad(loss)(Y)
  junk = np.where(GAPS[..., None], Y, 1e6).astype(np.float32)
  np.testing.assert_allclose(loss(junk), value, rtol=1e-6)
  np.testing.assert_array_equal(gradient[~GAPS], 0)
  assert np.abs(gradient[0, 0 if name != 'last' else 6]).min() > 0


def test_slots_are_averaged_and_the_same_everywhere():
  pool = pooling.Slots()
  state, pooled_BTD = pool(
    pool.initial_state(B, D), Y, GAPS, lambda: jnp.asarray(SLOTS, 'bfloat16')
  )
  assert jax.tree.leaves(state) == []
  assert pooled_BTD.dtype == jnp.float32
  expected = np.broadcast_to(SLOTS.mean(1)[:, None], Y.shape)
  np.testing.assert_allclose(pooled_BTD, expected, rtol=0.02, atol=0.02)


def test_only_slots_are_right_behind_the_segment_alone():
  assert pooling.Slots().at_end
  assert not any(pool.at_end for pool, _ in POOLS.values())
