"""All loops give what a loop over rows gives, and the same gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.recurrence import early_exit
from tests.stepping import assert_same
from tests.stepping import B
from tests.stepping import given
from tests.stepping import MOST
from tests.stepping import NEEDS
from tests.stepping import outcome
from tests.stepping import Toy

LOOPS = {
  'while': early_exit.while_loop,
  'cond': early_exit.cond_loop,
  'fixed': early_exit.fixed_loop,
  'masked': early_exit.masked_loop,
}
compiled = functools.cache(
  lambda name: jax.jit(functools.partial(outcome, LOOPS[name]))
)
step = jax.jit(Toy().step)
every = pytest.mark.parametrize('need', NEEDS)
early = pytest.mark.parametrize('name', ['while', 'cond', 'fixed'])


def taken(need):
  """Steps that each row takes, the last of which is dead."""
  return np.minimum(np.array(NEEDS[need]) * [1, 1, 1, 0], MOST)


@every
def test_the_reference_is_a_loop_over_rows(need):
  shared, rows, state = given(NEEDS[need])
  (end, sums, _), _ = compiled('masked')(shared, rows, state)
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


@every
@early
def test_they_agree_in_values_and_gradients(name, need):
  given_ = given(NEEDS[need])
  (state, sums, _), gradients = compiled(name)(*given_)
  (expected_state, expected, _), reference = compiled('masked')(*given_)
  assert_same((state, sums, gradients), (expected_state, expected, reference))
  assert all(np.abs(g).max() > 0 for g in gradients) == (need != 'none')


@every
def test_steps_that_are_computed(need):
  """The while loop ends when the last row has found that it halts."""
  given_ = given(NEEDS[need])
  ran = {name: compiled(name)(*given_)[0][2] for name in LOOPS}
  last = min(max(np.array(NEEDS[need])[:-1]) + 1, MOST)
  for name in ('while', 'cond'):
    np.testing.assert_array_equal(ran[name], np.full(B, last))
  for name in ('fixed', 'masked'):
    np.testing.assert_array_equal(ran[name], np.full(B, MOST))


@every
def test_the_backward_pass_computes_the_steps_that_some_row_took(need):
  """Beside them the forward pass computes the one in which all halt."""
  calls = []

  class Told(Toy):
    def step(self, shared, rows, l, state):
      jax.debug.callback(lambda: calls.append(1))
      return super().step(shared, rows, l, state)

  shared, rows, state = given(NEEDS[need])

  def loss(w):
    state_, _, ran_B = early_exit.while_loop(
      Told(), shared | {'w': w}, rows, state, MOST
    )
    return jnp.sum(state_['h']), ran_B

  _, ran_B = jax.jit(jax.grad(loss, has_aux=True))(shared['w'])
  jax.effects_barrier()
  assert len(calls) == ran_B[0] + max(taken(need))


def in_chunks(one, name, chunks=3):
  """A recurrence through chunks, each of which runs the loop."""
  shared, rows, state = given(NEEDS['mixed'])

  def chunk(w, h, m):
    state_, sums, _ = LOOPS[name](
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


@functools.cache
def masked_in_chunks():
  return in_chunks(lambda f: f, 'masked')


@pytest.mark.parametrize('remat', [False, True])
@early
def test_in_a_scan_over_chunks(name, remat):
  one = jax.checkpoint if remat else lambda f: f
  assert_same(in_chunks(one, name), masked_in_chunks())


@early
def test_bfloat16_states_keep_float32_sums(name):
  given_ = given(NEEDS['mixed'], dtype='bfloat16')
  (state, sums, ran_B), gradients = compiled(name)(*given_)
  (expected_state, expected, _), reference = compiled('masked')(*given_)
  assert state['h'].dtype == jnp.bfloat16
  assert sums['squares'].dtype == ran_B.dtype == jnp.float32
  assert {g.dtype for g in gradients} == {jnp.dtype('bfloat16')}
  assert_same((state, sums), (expected_state, expected))
  assert_same(gradients, reference, 0.02)


class Adder:
  """Steps: adds w; never halts."""

  def step(self, shared, rows, l, state):
    return state, {'total': jnp.ones(2) * shared}

  def alive(self, state):
    return jnp.ones(2, bool)

  def took(self, added):
    return jnp.ones(2, bool)


def test_gradients_are_added_up_in_float32():
  """In bfloat16 a sum of ones stays at 256."""

  def loss(w):
    _, sums, _ = early_exit.while_loop(Adder(), w, (), jnp.zeros((2, 1)), 500)
    return jnp.sum(sums['total'].astype(jnp.float32))

  assert jax.jit(jax.grad(loss))(jnp.ones((), jnp.bfloat16)) == 1000


def test_memory_is_that_of_one_step():
  """And the states that steps began with; the reference keeps all products."""
  B, D, F, most = 8, 16, 512, 20

  class Wide(Toy):
    def step(self, shared, rows, l, state):
      h_BF = jnp.tanh(state['h'] @ shared['in'])
      h_BF = jnp.sin(h_BF) * jnp.cos(h_BF)
      h_BD = state['h'] + h_BF @ shared['out']
      return {'h': h_BD, 'live': state['live']}, {'took': state['live']}

  shared = {'in': jnp.ones((D, F)), 'out': jnp.ones((F, D))}
  state = {'h': jnp.ones((B, D)), 'live': jnp.ones(B)}

  def temporary(name):
    def loss(shared, state):
      end, _, _ = LOOPS[name](Wide(), shared, (), state, most)
      return jnp.sum(end['h'])

    compiled = jax.jit(jax.grad(loss)).lower(shared, state).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  hidden, weights, notes = B * F * 4, 2 * D * F * 4, most * B * (D + 1) * 4
  ceiling = 4 * hidden + 2 * weights + 2 * notes
  assert temporary('while') < ceiling
  assert temporary('fixed') < ceiling
  assert temporary('cond') < 2 * ceiling
  assert temporary('masked') > 5 * ceiling
