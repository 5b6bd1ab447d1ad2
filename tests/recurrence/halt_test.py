"""The arithmetic of halting against plain float64, unit by unit."""

import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.recurrence import halt as halting
from meliad_rec.recurrence.halt import Counts
from meliad_rec.recurrence.halt import Halt
from meliad_rec.recurrence.halt import Units

B, U, L = 3, 4, 7

HALTS = {
  'official': Halt(),
  'early': Halt(threshold=0.6),
  'paper': Halt(threshold=0.6, keep_crossing=True, leftover=False),
}
every = pytest.mark.parametrize('halt', HALTS.values(), ids=HALTS)


def example():
  """p_l of all units, some of which are padding; steps but one of each row."""
  rng = np.random.default_rng(0)
  p_LBU = rng.uniform(0.05, 0.7, size=(L, B, U)).astype(np.float32)
  p_LBU[2, 0, 0] = 1  # One halts at once.
  active_BU = np.ones((B, U), bool)
  active_BU[1, 2:] = False
  max_steps_B1 = np.array([[L], [L], [2]])
  return p_LBU, active_BU, max_steps_B1


def slow(halt, p, live, most):
  """What one unit does: weights of the states it has, and what is left."""
  left, weights = 1.0, []
  for l in range(L if live else 0):
    crosses = left * (1 - p[l]) <= 1 - halt.threshold
    if l > most or (crosses and not halt.keep_crossing):
      break
    weights.append(left * p[l])
    left *= 1 - p[l]
    if crosses:
      break
  return weights, left


def run(halt, foreseen=False):
  """Units at the end, and of each step the weights and who took it."""
  p_LBU, active_BU, max_steps_B1 = example()
  units = Units.first(jnp.asarray(active_BU))
  weights, took = [], []
  for l in range(L):
    p_BU = jnp.asarray(p_LBU[l])
    if foreseen:
      units = halting.foresee(halt, units, p_BU, l, max_steps_B1)
    units, takes_BU, weight_BU = halting.advance(
      halt, units, p_BU, l, max_steps_B1
    )
    weights.append(weight_BU)
    took.append(takes_BU)
  return units, np.stack(weights), np.stack(took)


@every
def test_weights_are_those_of_each_unit_by_itself(halt):
  units, weight_LBU, takes_LBU = run(halt)
  p_LBU, active_BU, max_steps_B1 = example()
  depths = set()
  for b, u in np.ndindex(B, U):
    weights, left = slow(
      halt, np.float64(p_LBU[:, b, u]), active_BU[b, u], max_steps_B1[b, 0]
    )
    padded = weights + [0] * (L - len(weights))
    np.testing.assert_allclose(weight_LBU[:, b, u], padded, rtol=1e-5)
    np.testing.assert_allclose(units.remainder[b, u], left, rtol=1e-5)
    np.testing.assert_array_equal(
      takes_LBU[:, b, u], np.arange(L) < len(weights)
    )
    depths.add(len(weights))
  assert len(depths) > 3


@every
def test_weights_and_what_is_left_add_up_to_one(halt):
  units, weight_LBU, _ = run(halt)
  np.testing.assert_allclose(weight_LBU.sum(0) + units.remainder, 1, rtol=1e-6)


@every
def test_foreseeing_changes_nothing_but_who_is_alive(halt):
  for a, b in zip(run(halt)[1:], run(halt, foreseen=True)[1:], strict=True):
    np.testing.assert_array_equal(a, b)
  # The unit that halts at step 2 is known to before it, and not else.
  p_LBU, active_BU, max_steps_B1 = example()
  before = Units.first(jnp.asarray(active_BU))
  units = halting.foresee(halt, before, jnp.asarray(p_LBU[2]), 2, max_steps_B1)
  assert units.active[0, 0] == halt.keep_crossing
  np.testing.assert_array_equal(units.remainder, before.remainder)


def test_the_last_crossing_differs_by_no_more_than_what_it_leaves():
  _, official, _ = run(Halt(threshold=0.6))
  _, paper, _ = run(Halt(threshold=0.6, keep_crossing=True))
  more = ((paper > 0).sum(0) - (official > 0).sum(0)).ravel()
  assert set(more) == {0, 1}


def test_a_row_takes_as_many_steps_as_it_has_tokens_and_one():
  """However long the others are, and whatever becomes of a crossing."""
  for keep in (False, True):
    halt = Halt(threshold=1 - 1e-6, keep_crossing=keep)
    units = Units.first(jnp.ones((B, 1), bool))
    max_steps_B1 = jnp.array([[0], [1], [3]])
    depth_B = 0
    for l in range(L):
      p_BU = jnp.full((B, 1), 0.1)
      units, takes_BU, _ = halting.advance(halt, units, p_BU, l, max_steps_B1)
      depth_B += takes_BU[:, 0].astype(int)
    np.testing.assert_array_equal(depth_B, [1, 2, 4])
    np.testing.assert_array_equal(units.alive_B, [False] * 3)


def test_many_small_steps_still_reach_the_threshold():
  """As they would not in bfloat16, nor asked whether a sum is 0.999."""
  units = Units.first(jnp.ones((1, 1), bool))
  for l in range(100):
    units, _, _ = halting.advance(
      Halt(), units, jnp.full((1, 1), 0.1), l, jnp.array([[1000]])
    )
  assert not units.alive_B[0]
  # 0.9^65 is the last power above 0.001.
  np.testing.assert_allclose(units.remainder, 0.9**65, rtol=1e-4)


def test_the_penalty_is_the_expected_number_of_steps():
  weight_LU = np.array([[0.5, 0.2], [0.25, 0.1], [0.0, 0.3]])
  steps = np.arange(1, 4)[:, None]
  depth_BU = np.array([[2.0, 3.0]])
  zeros = jnp.zeros((1, 3))
  counts = Counts((weight_LU * steps).sum(0)[None], depth_BU, zeros, zeros)
  remainder_BU = 1 - weight_LU.sum(0)[None]
  cost = halting.cost(Halt(), remainder_BU, counts)
  # What is left lies on the state behind the last step.
  np.testing.assert_allclose(cost, [[1.0 + 0.25 * 2, 1.3 + 0.4 * 3]])
  cost = halting.cost(Halt(leftover=False), remainder_BU, counts)
  np.testing.assert_allclose(cost, [[1.0, 1.3]])


def test_sums_at_a_step():
  a_BU = jnp.arange(6.0).reshape(2, 3)
  np.testing.assert_array_equal(
    halting.at_step(a_BU, 1, 4), [[0, 3, 0, 0], [0, 12, 0, 0]]
  )
  assert not halting.at_step(a_BU, 4, 4).any()


def test_rows_are_alive_while_any_unit_is():
  active_BU = jnp.array([[True, False], [False, False], [True, True]])
  units = Units.first(active_BU)
  assert units.remainder.dtype == units.active.dtype == jnp.float32
  np.testing.assert_array_equal(units.alive_B, [True, False, True])
  np.testing.assert_array_equal(units.remainder, np.ones((3, 2)))


@pytest.mark.parametrize('threshold', [0.0, 1.0, 1.5])
def test_the_threshold_lies_between_0_and_1(threshold):
  with pytest.raises(ValueError, match=f'is {threshold}; .* HALT_THRESHOLD'):
    Halt(threshold=threshold)


def test_the_penalty_is_not_negative():
  with pytest.raises(ValueError, match=r'is -0.1; .* Set PONDER_COST'):
    Halt(ponder_cost=-0.1)
