"""Early exit of each row by itself, for inference: rows that halted leave.

As soon as half of the rows have halted, the others go on in an array of half
the size, and so on down to one row: shapes are static, and the program is one.
"""

import jax
import jax.numpy as jnp

from meliad_rec.halting.loop import Steps


def compacted_loop(steps: Steps, shared, rows, state, most: int):
  """As loop.while_loop, without a gradient."""
  l = jnp.zeros((), jnp.int32)
  _, added = jax.eval_shape(steps.step, shared, rows, l, state)
  sums = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), added)
  ran_B = jnp.zeros(len(jax.tree.leaves(state)[0]))
  return _run(steps, shared, rows, l, (state, sums, ran_B), most)


def _run(steps, shared, rows, l, carry, most):
  """Goes on while more than half of the rows do, then with that half alone."""
  half = len(carry[2]) // 2

  def goes_on(carry):
    l, (state, _, _) = carry
    return (l < most) & (jnp.sum(steps.alive(state)) > half)

  def body(carry):
    l, (state, sums, ran_B) = carry
    state, added = steps.step(shared, rows, l, state)
    return l + 1, (state, jax.tree.map(jnp.add, sums, added), ran_B + 1)

  l, carry = jax.lax.while_loop(goes_on, body, (l, carry))
  if not half:
    return carry
  rest_S = jnp.argsort(~steps.alive(carry[0]), stable=True)[:half]
  pick = lambda tree: jax.tree.map(lambda a: a[rest_S], tree)
  part = _run(steps, shared, pick(rows), l, pick(carry), most)
  put = lambda a, b: a.at[rest_S].set(b)
  return jax.tree.map(put, carry, part)
