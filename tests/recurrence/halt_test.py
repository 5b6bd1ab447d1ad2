"""The arithmetic of halting against plain float64, unit by unit."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.recurrence import halt as halting
from meliad_rec.recurrence.halt import Counts
from meliad_rec.recurrence.halt import Halt
from meliad_rec.recurrence.halt import HaltingGate
from meliad_rec.recurrence.halt import mean
from meliad_rec.recurrence.halt import Units
from tests.cells import assert_close

B, U, L = 3, 4, 7
HALTS = {
  'official': Halt(),
  'early': Halt(threshold=0.6),
  'paper': Halt(threshold=0.6, keep_crossing=True, leftover=False),
}
every = pytest.mark.parametrize('halt', HALTS.values(), ids=HALTS)


def example():
  """Returns p_l of all units, some of them padding, and max_steps_B1."""
  rng = np.random.default_rng(0)
  p_LBU = rng.uniform(0.05, 0.7, size=(L, B, U)).astype(np.float32)
  p_LBU[2, 0, 0] = 1  # One halts at once.
  active_BU = np.ones((B, U), bool)
  active_BU[1, 2:] = False
  max_steps_B1 = np.array([[L], [L], [2]])
  return p_LBU, active_BU, max_steps_B1


def slow(halt, p, live, most):
  """Returns the weights of one unit and its remainder."""
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
  """Returns the final units, and weights and takers of each step."""
  p_LBU, active_BU, max_steps_B1 = example()
  units = Units.initial(jnp.asarray(active_BU))
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
  before = Units.initial(jnp.asarray(active_BU))
  units = halting.foresee(halt, before, jnp.asarray(p_LBU[2]), 2, max_steps_B1)
  assert units.active[0, 0] == halt.keep_crossing
  np.testing.assert_array_equal(units.remainder, before.remainder)


def test_the_last_crossing_differs_by_no_more_than_what_it_leaves():
  _, official, _ = run(Halt(threshold=0.6))
  _, paper, _ = run(Halt(threshold=0.6, keep_crossing=True))
  more = ((paper > 0).sum(0) - (official > 0).sum(0)).ravel()
  assert set(more) == {0, 1}


def test_a_row_takes_as_many_steps_as_it_has_tokens_and_one():
  """Independent of other rows, and of `keep_crossing`."""
  for keep in (False, True):
    halt = Halt(threshold=1 - 1e-6, keep_crossing=keep)
    units = Units.initial(jnp.ones((B, 1), bool))
    max_steps_B1 = jnp.array([[0], [1], [3]])
    depth_B = 0
    for l in range(L):
      p_BU = jnp.full((B, 1), 0.1)
      units, takes_BU, _ = halting.advance(halt, units, p_BU, l, max_steps_B1)
      depth_B += takes_BU[:, 0].astype(int)
    np.testing.assert_array_equal(depth_B, [1, 2, 4])
    np.testing.assert_array_equal(units.active_B, [False] * 3)


def test_many_small_steps_still_reach_the_threshold():
  """Sums of weights in bfloat16 would never reach 0.999."""
  units = Units.initial(jnp.ones((1, 1), bool))
  for l in range(100):
    units, _, _ = halting.advance(
      Halt(), units, jnp.full((1, 1), 0.1), l, jnp.array([[1000]])
    )
  assert not units.active_B[0]
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


@pytest.mark.parametrize('threshold', [0.0, 1.0, 1.5])
def test_the_threshold_lies_between_0_and_1(threshold):
  with pytest.raises(ValueError, match='HALT_THRESHOLD'):
    Halt(threshold=threshold)


def test_the_penalty_is_not_negative():
  with pytest.raises(ValueError, match='PONDER_COST'):
    Halt(ponder_cost=-0.1)


GATE_B, T, D, F = 3, 5, 20, 28


def vectors(count, dtype='float32'):
  rng = np.random.default_rng(0)
  return [
    jnp.asarray(rng.normal(size=(GATE_B, T, D)), dtype) for _ in range(count)
  ]


@pytest.mark.parametrize('count', [1, 2])
def test_is_the_papers_equation(count):
  h = vectors(count)
  p_BT, variables = HaltingGate(F).init_with_output(jax.random.key(0), *h)
  params = jax.tree.map(np.float64, variables['params'])
  h_BTX = np.concatenate([np.float64(a) for a in h], -1)
  x_BTF = h_BTX @ params['hidden']['kernel'] + params['hidden']['bias']
  # The exact form of GELU.
  x_BTF = x_BTF * 0.5 * (1 + np.vectorize(math.erf)(x_BTF / 2**0.5))
  z_BT = (x_BTF @ params['last']['kernel'] + params['last']['bias'])[..., 0]
  np.testing.assert_allclose(p_BT, 1 / (1 + np.exp(-z_BT)), rtol=1e-5)


@pytest.mark.parametrize('bias, p', [(0.0, 0.5), (-3.0, 0.047426)])
def test_bias_is_where_a_new_gate_stands(bias, p):
  zeros = jnp.zeros((GATE_B, T, D))
  gate = HaltingGate(F, bias)
  p_BT, variables = gate.init_with_output(jax.random.key(0), zeros)
  np.testing.assert_allclose(p_BT, np.full((GATE_B, T), p), rtol=1e-5)
  # Uniform, to one by the root of the inputs.
  for name, inputs in (('hidden', D), ('last', F)):
    kernel = variables['params'][name]['kernel']
    assert 0.8 < np.abs(kernel).max() * inputs**0.5 <= 1


def test_bfloat16_vectors_are_judged_in_float32():
  h = vectors(2, 'bfloat16')
  p_BT, variables = HaltingGate(F).init_with_output(jax.random.key(0), *h)
  assert p_BT.dtype == jnp.float32
  wide = [a.astype(jnp.float32) for a in h]
  np.testing.assert_array_equal(p_BT, HaltingGate(F).apply(variables, *wide))
  assert len(set(np.asarray(p_BT.astype(jnp.bfloat16)).ravel())) < GATE_B * T
  assert len(set(np.asarray(p_BT).ravel())) == GATE_B * T


@pytest.mark.parametrize('causal', [False, True])
def test_means_leave_padding_out(causal):
  (h_BTD,) = vectors(1)
  mask_BT = np.arange(T) < np.array([T, 3, 0])[:, None]
  found = mean(h_BTD, mask_BT, causal)
  expected = np.zeros((GATE_B, T if causal else 1, D))
  for b in range(GATE_B):
    for t in range(T if causal else 1):
      seen = mask_BT[b] & (np.arange(T) <= t if causal else True)
      if seen.any():
        expected[b, t] = np.float64(h_BTD)[b, seen].mean(0)
  assert_close(found, expected)
  junk_BTD = h_BTD + 100 * ~mask_BT[..., None]
  np.testing.assert_array_equal(mean(junk_BTD, mask_BT, causal), found)


def test_means_of_bfloat16_are_added_up_in_float32():
  """In bfloat16 a sum of ones stays at 256."""
  ones = jnp.ones((1, 1000, 1), jnp.bfloat16)
  for causal in (False, True):
    found = mean(ones, np.ones((1, 1000), bool), causal)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.ones_like(found))
