"""The arithmetic of halting against plain float64, unit by unit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.recurrence import halt as halting
from meliad_rec.recurrence.halt import Counts
from meliad_rec.recurrence.halt import Halt
from meliad_rec.recurrence.halt import HaltingGate
from meliad_rec.recurrence.halt import mean_state
from meliad_rec.recurrence.halt import Units

B, U, L = 3, 4, 7
HALTS = {
  'official': Halt(),
  'early': Halt(threshold=0.6),
  'paper': Halt(threshold=0.6, keep_crossing=True, leftover=False),
}


def example():
  """Returns p_l of all units, some of them padding, and last_step_B1."""
  rng = np.random.default_rng(0)
  p_LBU = rng.uniform(0.05, 0.7, size=(L, B, U)).astype(np.float32)
  p_LBU[2, 0, 0] = 1  # One halts at once.
  active_BU = np.ones((B, U), bool)
  active_BU[1, 2:] = False
  last_step_B1 = np.array([[L], [L], [2]])
  return p_LBU, active_BU, last_step_B1


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
  p_LBU, active_BU, last_step_B1 = example()
  units = Units.initial(jnp.asarray(active_BU))
  weights, took = [], []
  for l in range(L):
    p_BU = jnp.asarray(p_LBU[l])
    if foreseen:
      units = halting.halt_ahead(halt, units, p_BU, l, last_step_B1)
    units, updated_BU, weight_BU = halting.advance(
      halt, units, p_BU, l, last_step_B1
    )
    weights.append(weight_BU)
    took.append(updated_BU)
  return units, np.stack(weights), np.stack(took)


@pytest.mark.parametrize('halt', HALTS.values(), ids=HALTS)
def test_weights_are_those_of_each_unit_by_itself(halt):
  units, weight_LBU, takes_LBU = run(halt)
  p_LBU, active_BU, last_step_B1 = example()
  depths = set()
  for b, u in np.ndindex(B, U):
    weights, left = slow(
      halt, np.float64(p_LBU[:, b, u]), active_BU[b, u], last_step_B1[b, 0]
    )
    padded = weights + [0] * (L - len(weights))
    np.testing.assert_allclose(weight_LBU[:, b, u], padded, rtol=1e-5)
    np.testing.assert_allclose(units.remainder[b, u], left, rtol=1e-5)
    np.testing.assert_array_equal(
      takes_LBU[:, b, u], np.arange(L) < len(weights)
    )
    depths.add(len(weights))
  assert len(depths) > 3
  np.testing.assert_allclose(weight_LBU.sum(0) + units.remainder, 1, rtol=1e-6)
  # Foreseeing changes nothing but who is active.
  for a, b in zip(run(halt, foreseen=True)[1:], run(halt)[1:], strict=True):
    np.testing.assert_array_equal(a, b)
  # The unit that halts at step 2 is known to before it, and not else.
  before = Units.initial(jnp.asarray(active_BU))
  units = halting.halt_ahead(
    halt, before, jnp.asarray(p_LBU[2]), 2, last_step_B1
  )
  assert units.active[0, 0] == halt.keep_crossing
  np.testing.assert_array_equal(units.remainder, before.remainder)


def test_the_penalty_is_the_expected_number_of_steps():
  weight_LU = np.array([[0.5, 0.2], [0.25, 0.1], [0.0, 0.3]])
  steps = np.arange(1, 4)[:, None]
  depth_BU = np.array([[2.0, 3.0]])
  zeros = np.zeros((1, 3))
  counts = Counts((weight_LU * steps).sum(0)[None], depth_BU, zeros, zeros)
  remainder_BU = 1 - weight_LU.sum(0)[None]
  found = halting.expected_steps(Halt(), remainder_BU, counts)
  # What is left lies on the state behind the last step.
  np.testing.assert_allclose(found, [[1.0 + 0.25 * 2, 1.3 + 0.4 * 3]])
  # Equation 8: halting at the initial state costs nothing.
  found = halting.expected_steps(Halt(leftover=False), remainder_BU, counts)
  np.testing.assert_allclose(found, [[0.25, 0.1 + 2 * 0.3]])


@pytest.mark.parametrize('bias, p', [(0.0, 0.5), (-3.0, 0.047426)])
def test_bias_is_where_a_new_gate_stands(bias, p):
  D, F = 20, 28
  init = jax.jit(HaltingGate(F, bias).init_with_output)
  p_BT, variables = init(jax.random.key(0), jnp.zeros((B, 5, D)))
  np.testing.assert_allclose(p_BT, np.full((B, 5), p), rtol=1e-5)
  # Uniform, to one by the root of the inputs.
  for name, inputs in (('hidden', D), ('last', F)):
    kernel = variables['params'][name]['kernel']
    assert 0.8 < np.abs(kernel).max() * inputs**0.5 <= 1


def test_means_of_bfloat16_are_added_up_in_float32():
  """In bfloat16 a sum of ones stays at 256."""
  ones = jnp.ones((1, 1000, 1), jnp.bfloat16)
  for causal in (False, True):
    found = mean_state(ones, np.ones((1, 1000), bool), causal)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.ones_like(found))
