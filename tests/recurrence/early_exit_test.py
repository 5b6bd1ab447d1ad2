"""Loops with early exit against all steps, and against a loop over rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.recurrence.early_exit import compacted_loop
from meliad_rec.recurrence.early_exit import while_loop
from tests.cells import assert_close
from tests.stepping import B
from tests.stepping import given
from tests.stepping import masked_loop
from tests.stepping import MOST
from tests.stepping import NEEDS
from tests.stepping import outcome
from tests.stepping import Toy

compiled = functools.cache(
  lambda loop: jax.jit(functools.partial(outcome, loop))
)
calls = []


class Counting(Toy):
  def step(self, shared, rows, l, state):
    jax.debug.callback(lambda: calls.append(1))
    return super().step(shared, rows, l, state)


def counted_loop(_, *arguments):
  return while_loop(Counting(), *arguments)


def taken(need):
  """Returns the steps that each row takes; the last row is inactive."""
  return np.minimum(np.array(NEEDS[need]) * [1, 1, 1, 0], MOST)


@pytest.mark.parametrize('need', ['more than there are', 'mixed'])
def test_the_reference_is_a_loop_over_rows(need):
  shared, rows, state = given(NEEDS[need])
  (end, sums, ran_B), _ = compiled(masked_loop)(shared, rows, state)
  np.testing.assert_array_equal(ran_B, np.full(B, MOST))
  step = jax.jit(Toy().step)
  for b in range(B):
    one = lambda tree, b=b: jax.tree.map(lambda a: a[b : b + 1], tree)
    row, squares = one(state), 0.0
    for l in range(taken(need)[b]):
      row, added = step(shared, one(rows), l, row)
      squares += added['squares']
    np.testing.assert_allclose(end['h'][b], row['h'][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
      sums['squares'][b : b + 1], squares, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize('need', NEEDS)
def test_values_gradients_and_the_steps_that_are_computed(need):
  given_ = given(NEEDS[need])
  calls.clear()
  (*found, ran_B), gradients = compiled(counted_loop)(*given_)
  jax.effects_barrier()
  (*expected, _), reference = compiled(masked_loop)(*given_)
  assert_close((found, gradients), (expected, reference), 1e-6)
  assert all(np.abs(g).max() > 0 for g in gradients) == (need != 'none')
  # The loop ends after the step in which the last row halts; the backward pass
  # computes the steps that some row took.
  last = min(max(np.array(NEEDS[need])[:-1]) + 1, MOST)
  np.testing.assert_array_equal(ran_B, np.full(B, last))
  assert len(calls) == last + max(taken(need))


def in_chunks(one, loop, chunks=3):
  """Returns value and gradients of a scan whose chunks run the loop."""
  shared, rows, state = given(NEEDS['mixed'])

  def chunk(w, h, m):
    state_, sums, _ = loop(
      Toy(), shared | {'w': w}, rows | {'m': m}, state | {'h': h}, MOST
    )
    return state_['h'], sums['squares']

  def loss(w, h):
    m = jnp.stack([rows['m'] * i for i in range(chunks)])
    body = lambda h, m: one(chunk)(w, h, m)
    h, squares = jax.lax.scan(body, h, m)
    return jnp.sum(h**2) + jnp.sum(jnp.sin(squares))

  grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
  return grad(shared['w'], state['h'])


def test_in_a_scan_over_chunks():
  same = lambda f: f
  expected = in_chunks(same, masked_loop)
  for one in same, jax.checkpoint:
    assert_close(in_chunks(one, while_loop), expected, 1e-6)


def test_bfloat16_states_keep_float32_sums():
  given_ = given(NEEDS['mixed'], dtype='bfloat16')
  (state, sums, ran_B), gradients = compiled(while_loop)(*given_)
  (expected_state, expected, _), reference = compiled(masked_loop)(*given_)
  assert state['h'].dtype == jnp.bfloat16
  assert sums['squares'].dtype == ran_B.dtype == jnp.float32
  assert {g.dtype for g in gradients} == {jnp.dtype('bfloat16')}
  assert_close((state, sums), (expected_state, expected), 1e-6)
  assert_close(gradients, reference, 0.02)


class Adder:
  """Steps that add w and never halt."""

  def step(self, shared, rows, l, state):
    return state, {'total': jnp.ones(2) * shared}

  def active(self, state):
    return jnp.ones(2, bool)

  def changed(self, added):
    return jnp.ones(2, bool)


def test_gradients_are_added_up_in_float32():
  """In bfloat16 a sum of ones stays at 256."""

  def loss(w):
    _, sums, _ = while_loop(Adder(), w, (), jnp.zeros((2, 1)), 500)
    return jnp.sum(sums['total'].astype(jnp.float32))

  assert jax.jit(jax.grad(loss))(jnp.ones((), jnp.bfloat16)) == 1000


def test_memory_is_that_of_one_step():
  """Plus the recorded states; the reference stores all products."""
  B, D, F, most = 8, 16, 512, 20

  class Wide(Toy):
    def step(self, shared, rows, l, state):
      h_BF = jnp.tanh(state['h'] @ shared['in'])
      h_BF = jnp.sin(h_BF) * jnp.cos(h_BF)
      h_BD = state['h'] + h_BF @ shared['out']
      return {'h': h_BD, 'live': state['live']}, {'took': state['live']}

  shared = {'in': jnp.ones((D, F)), 'out': jnp.ones((F, D))}
  state = {'h': jnp.ones((B, D)), 'live': jnp.ones(B)}

  def temporary(loop):
    def loss(shared, state):
      end, _, _ = loop(Wide(), shared, (), state, most)
      return jnp.sum(end['h'])

    compiled = jax.jit(jax.grad(loss)).lower(shared, state).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  hidden, weights, notes = B * F * 4, 2 * D * F * 4, most * B * (D + 1) * 4
  ceiling = 4 * hidden + 2 * weights + 2 * notes
  assert temporary(while_loop) < ceiling
  assert temporary(masked_loop) > 5 * ceiling


# Of unlike numbers of rows, powers of two or not; the last row is dead.
ROWS = {
  'eight': [5, 0, 1, 1, 6, 0, 2, 9],
  'seven': [0, 1, 2, 3, 4, 5, 0],
  'one alive': [3, 0],
  'none': [0, 0, 0],
}


def computed(need):
  """Returns the steps computed for each row, by hand."""
  ran, l = np.zeros(len(need), int), 0
  rows = list(range(len(need)))
  goes_on = lambda r: r < len(need) - 1 and l < need[r] + 1
  while True:
    while l < MOST and sum(map(goes_on, rows)) > len(rows) // 2:
      ran[rows] += 1
      l += 1
    if len(rows) == 1:
      return ran
    rows.sort(key=lambda r: not goes_on(r))
    rows = rows[: len(rows) // 2]


@pytest.mark.parametrize('name', ROWS)
def test_outputs_are_the_same_and_work_is_what_rows_need(name):
  need = ROWS[name]
  given_ = given(need, rows=len(need))
  run = lambda loop: jax.jit(
    lambda *a: functools.partial(loop, Toy())(*a, MOST)
  )(*given_)
  *found, ran_B = run(compacted_loop)
  *expected, _ = run(masked_loop)
  # A product with one row may be rounded in another order.
  assert_close(found, expected, 2e-7)
  np.testing.assert_array_equal(ran_B, computed(need))


def test_a_compacted_loop_has_the_gradients_of_a_while_loop():
  given_ = given(NEEDS['mixed'])
  found, expected = (compiled(f)(*given_) for f in (compacted_loop, while_loop))
  assert_close(found, expected, 0)
