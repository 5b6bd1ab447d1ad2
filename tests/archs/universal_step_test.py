"""One step of a recurrence in depth: what it changes and adds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.universal import DepthState
from meliad_rec.archs.universal import mix
from meliad_rec.archs.universal import Recurrence
from meliad_rec.archs.universal import Rows
from meliad_rec.archs.universal import Shared
from meliad_rec.layers.encoder_layer import EncoderLayer
from meliad_rec.recurrence.halt import Halt
from meliad_rec.recurrence.halt import HaltingGate
from meliad_rec.recurrence.halt import Units
from tests.architectures import D
from tests.architectures import encoder_config

B, T, STEPS = 3, 5, 4
HALT = Halt()

# Whether tokens halt together, whether the state behind is asked, causal.
KINDS = {
  'ut': (False, False, False),
  'gut': (True, True, False),
  'gut causal': (True, True, True),
}
kinds = pytest.mark.parametrize('kind', KINDS)


def example():
  """Row 2 is empty."""
  rng = np.random.default_rng(0)
  x_BTD = rng.normal(size=(B, T, D)).astype(np.float32)
  return x_BTD, np.arange(T) < np.array([T, 2, 0])[:, None]


@functools.cache
def made(kind, halt=HALT, dtype='float32', dropout=0.0):
  """Returns a recurrence, its parameters and rows."""
  together, transition, causal = KINDS[kind]
  x_BTD, mask_BT = example()
  layer = EncoderLayer(encoder_config(causal, dtype=dtype, dropout=dropout))
  gate = HaltingGate(D, halt.bias_init)
  params = jax.jit(layer.init)(jax.random.key(0), x_BTD, mask_BT)['params']
  inputs = [x_BTD] * (1 + transition)
  of_gate = jax.jit(gate.init)(jax.random.key(1), *inputs)['params']
  recurrence = Recurrence(layer, gate, halt, together, transition, STEPS)
  rng = jax.random.key_data(jax.random.key(2)) if dropout else None
  shared = Shared(params, of_gate, rng)
  return recurrence, shared, Rows.of(jnp.asarray(mask_BT), None, causal)


def begun(kind, **options):
  recurrence, shared, rows = made(kind, **options)
  dtype = recurrence.layer.config.dtype
  state, counts = recurrence.initial_state(
    shared, rows, example()[0].astype(dtype)
  )
  step = jax.jit(lambda l, state: recurrence.step(shared, rows, l, state))
  return recurrence, state, counts, step


def test_rows_know_how_many_steps_they_can_take():
  _, mask_BT = example()
  rows = Rows.of(mask_BT, None, causal=False)
  np.testing.assert_array_equal(rows.max_steps_B1, [[T], [2], [0]])
  # Of a causal one it must not depend on tokens that follow.
  assert len(set(Rows.of(mask_BT, None, True).max_steps_B1[:, 0].tolist())) == 1


@kinds
def test_what_is_live_at_first(kind):
  """Active units are tokens, or rows with tokens."""
  recurrence, state, counts, _ = begun(kind)
  _, mask_BT = example()
  active_BU = mask_BT.any(1, keepdims=True) if kind == 'gut' else mask_BT
  np.testing.assert_array_equal(state.units.active, active_BU)
  np.testing.assert_array_equal(recurrence.active(state), [True, True, False])
  asked = [5, 2, 0] if kind == 'ut' else [0, 0, 0]  # Before the first step.
  np.testing.assert_array_equal(counts.asked[:, 0], asked)
  assert (state.p_BU is None) == (kind != 'ut')


@kinds
def test_dead_units_stay_as_they_are_and_add_nothing(kind):
  recurrence, state, _, step = begun(kind)
  active_BU = state.units.active.at[0].set(0)
  state = state.replace(units=state.units.replace(active=active_BU))
  new, added = step(0, state)
  np.testing.assert_array_equal(new.h_BTD[0], state.h_BTD[0])
  np.testing.assert_array_equal(
    new.units.remainder[0], state.units.remainder[0]
  )
  np.testing.assert_array_equal(new.units.active[0], 0)
  for a in jax.tree.leaves(added):
    np.testing.assert_array_equal(a[0], 0)
    np.testing.assert_array_equal(a[2], 0)
  if state.mixed_BTD is not None:
    np.testing.assert_array_equal(new.mixed_BTD[0], state.mixed_BTD[0])
  _, mask_BT = example()
  assert np.abs(new.h_BTD - state.h_BTD)[1][mask_BT[1]].min() > 0
  np.testing.assert_array_equal(recurrence.changed(added), [False, True, False])


@kinds
def test_the_step_in_which_a_unit_halts_is_thrown_away(kind):
  """Its state stays, except that it has halted."""
  recurrence, state, _, step = begun(kind, halt=Halt(threshold=1e-6))
  new, added = step(0, state)
  assert (
    not recurrence.active(new).any() and not recurrence.changed(added).any()
  )
  np.testing.assert_array_equal(new.h_BTD, state.h_BTD)
  np.testing.assert_array_equal(new.units.remainder, state.units.remainder)
  np.testing.assert_array_equal(added.counts.depth, 0)
  # Where it is known before, no step is begun at all.
  assert recurrence.active(state).any() == (kind != 'ut')
  asked = {'ut': [0, 0, 0], 'gut': [1, 1, 0], 'gut causal': [5, 2, 0]}
  np.testing.assert_array_equal(added.counts.asked[:, 0], asked[kind])


@kinds
def test_the_output_is_the_weighted_sum_of_states(kind):
  _, state, _, step = begun(kind, halt=Halt(threshold=1 - 1e-6))
  together = state.mixed_BTD is None
  states, weights, sums = [], [], 0.0
  for l in range(STEPS - 1):
    states.append(np.float64(state.h_BTD))
    new, added = step(l, state)
    weights.append(np.float64(state.units.remainder - new.units.remainder))
    sums += added.mixed_BTD if together else 0.0
    state = new
  expected = sum(
    w[..., None] * h for w, h in zip(weights, states, strict=True)
  ) + np.float64(state.units.remainder)[..., None] * np.float64(state.h_BTD)
  found = mix(sums if together else state.mixed_BTD, state)
  np.testing.assert_allclose(found, expected, atol=1e-5)
  assert min(w[0].max() for w in weights) > 0.01


def test_bfloat16_states_are_weighed_in_float32():
  _, state, counts, step = begun('ut', dtype='bfloat16')
  new, added = step(0, state)
  assert new.h_BTD.dtype == jnp.bfloat16
  wide = new.units, new.p_BU, new.mixed_BTD, counts, added
  assert {a.dtype for a in jax.tree.leaves(wide)} == {jnp.dtype('float32')}
  assert mix(new.mixed_BTD, new).dtype == jnp.bfloat16


def test_each_step_draws_its_own_dropout_and_always_the_same():
  _, state, _, step = begun('gut', dropout=0.5)
  h = lambda l: np.asarray(step(l, state)[0].h_BTD)
  np.testing.assert_array_equal(h(0), h(0))
  assert np.abs(h(0) - h(1)).max() > 0.1


def test_mix_of_one_state_is_the_state():
  h_BTD = jnp.ones((B, T, D))
  units = Units.initial(jnp.ones((B, 1), bool))
  state = DepthState(h_BTD, units, None, None)
  np.testing.assert_array_equal(mix(jnp.zeros_like(h_BTD), state), h_BTD)
