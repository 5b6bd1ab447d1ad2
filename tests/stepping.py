"""A small recurrence in depth whose rows halt after given numbers of steps."""

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.recurrence.early_exit import initial_carry
from meliad_rec.recurrence.early_exit import take_step

B, D, S, MOST = 4, 6, 3, 6

# Steps that each row takes; LIVE says which rows begin at all.
NEEDS = {
  'none': [0, 0, 0, 0],
  'one': [1, 1, 1, 1],
  'middle': [3, 3, 3, 3],
  'all': [MOST, MOST, MOST, MOST],
  'more than there are': [MOST + 3, 2, MOST, 1],
  'mixed': [2, 0, 4, 1],
}


class Toy:
  """Steps: h = tanh(h w + m + memory), with the same dropout of h in all rows.

  A row takes `need` steps. One more step finds out that it halts, as in GUT,
  which must compute the next state before it knows that it does not take it.
  """

  def step(self, shared, rows, l, state):
    rng = jax.random.fold_in(jax.random.wrap_key_data(shared['rng']), l)
    keep_D = jax.random.bernoulli(rng, 0.8, state['h'].shape[-1:])
    takes_B = (state['live'] > 0) & (l < rows['need'])
    memory_BSD = jnp.where(rows['seen'][..., None], rows['memory'], 0)
    new_BD = jnp.tanh(
      state['h'] @ shared['w'] + rows['m'] + memory_BSD.mean(1)
    ).astype(state['h'].dtype)
    h_BD = jnp.where(takes_B[:, None], new_BD * keep_D, state['h'])
    weight_B1 = takes_B[:, None] * (l + 1.0)
    added = {
      'squares': weight_B1 * jnp.square(new_BD.astype(jnp.float32)),
      'took': takes_B.astype(jnp.float32),
    }
    return {'h': h_BD, 'live': takes_B.astype(jnp.float32)}, added

  def active(self, state):
    return state['live'] > 0

  def changed(self, added):
    return added['took'] > 0


def given(need, rows=B, dtype='float32'):
  """Returns arguments of a loop, not only floats; the last row is inactive."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  shared = {
    'w': normal(D, D) * 0.4,
    'rng': jax.random.key_data(jax.random.key(0)),
  }
  of_rows = {
    'm': normal(rows, D),
    'memory': normal(rows, S, D),
    'seen': jnp.asarray(rng.random((rows, S)) < 0.7),
    'need': jnp.asarray(need, jnp.int32),
  }
  live_B = jnp.arange(rows) < rows - 1
  state = {'h': normal(rows, D), 'live': live_B.astype(jnp.float32)}
  return shared, of_rows, state


def masked_loop(steps, shared, rows, state, max_steps):
  """Runs all steps in a scan, which has JAX's own gradient: the reference."""

  def body(carry, l):
    return take_step(steps.step, shared, rows, l, carry)[0], None

  carry = initial_carry(steps.step, shared, rows, state)
  return jax.lax.scan(body, carry, jnp.arange(max_steps))[0]


def outcome(loop, shared, rows, state, most=MOST):
  """Results of a loop, and gradients of all floats that it was given."""

  def loss(w, m, memory, h):
    results = loop(
      Toy(),
      shared | {'w': w},
      rows | {'m': m, 'memory': memory},
      state | {'h': h},
      most,
    )
    state_, sums, _ = results
    last = jnp.sum(jnp.square(state_['h'].astype(jnp.float32)))
    return last + jnp.sum(jnp.sin(sums['squares'])), results

  gradients, results = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(
    shared['w'], rows['m'], rows['memory'], state['h']
  )
  return results, gradients
