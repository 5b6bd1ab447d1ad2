"""Loops over the steps of a recurrence in depth; they end when all rows halt.

JAX has no reverse-mode gradient of a loop of unknown length. In `while_loop`
the forward pass is a while loop that records the state before each step. The
backward pass is another while loop, which computes each step again. It takes at
most as many steps as the forward pass. It needs memory for one step and for the
recorded states.

For inference, `compacted_loop` lets rows leave the batch as they halt. As soon
as half of the rows have halted, the other rows continue in arrays of half the
size, and so on down to one row. All shapes are static, so one compiled program
does all of this.

Every loop takes (steps, shared, rows, state, max_steps). `steps` is an object
with the methods of `DepthSteps`. `shared` holds parameters and random keys,
without a row axis. `rows` holds inputs of each row that do not change. `state`
is the state before the first step. Loops return (state, sums, ran_B): the last
state; the sums over all steps of the values that a step returns in addition to
the state; and the number of steps computed for each row, in float32. Every leaf
of `rows`, the states and the sums is [B, ...]; states and sums are floats.
"""

from collections.abc import Callable
import functools
from typing import Any
from typing import Protocol

import jax
import jax.numpy as jnp


class DepthSteps(Protocol):
  """The step in depth that the loops of this file repeat until rows halt.

  It holds no arrays: `step` takes all arrays as arguments, so that a loop of
  jax.lax can call it.
  """

  def step(self, shared, rows, l, state) -> tuple[Any, Any]:
    """Returns the state after step l, and the terms for the loop's sums.

    A row that is not active keeps its state and adds 0 to the sums.

    Args:
      shared: parameters and random keys, without a row axis.
      rows: inputs of each row that do not change.
      l: int, the step, from 0.
      state: the state before the step.
    """

  def active(self, state) -> jax.Array:
    """Returns bool [B], True at rows that continue."""

  def changed(self, added) -> jax.Array:
    """Returns bool [B], True at rows that a step has changed.

    The last steps of a loop may change no row, but only find that rows halt.
    The backward pass of `while_loop` leaves out these steps.

    Args:
      added: the values that the step added to the sums.
    """


def while_loop(steps: DepthSteps, shared, rows, state, max_steps: int):
  """Runs steps until no row is active, or max_steps have run.

  This loop has a gradient in reverse mode only. The top of this file describes
  the arguments and the result (state, sums, ran_B).
  """
  floats, others, join = split_floats((shared, rows))
  return _while(_Static(steps, join, max_steps), floats, others, state)


def compacted_loop(steps: DepthSteps, shared, rows, state, max_steps: int):
  """Runs steps like while_loop, but rows leave the batch as they halt.

  Calls that are differentiated run while_loop instead, with its gradient.
  """
  floats, others, join = split_floats((shared, rows))
  return _compacted(_Static(steps, join, max_steps), floats, others, state)


def recorded_loop(steps: DepthSteps, shared, rows, state, max_steps: int):
  """Runs all steps, and keeps the carry after each of them, for pictures.

  The arguments are as in the other loops.

  Returns:
    The carries (state, sums, ran_B) before each step, and those after each
    step, stacked along a new axis 0. Rows that have halted do not change.
  """
  start = initial_carry(steps.step, shared, rows, state)

  def step(carry, l):
    after, _ = take_step(steps.step, shared, rows, l, carry)
    return after, (carry, after)

  return jax.lax.scan(step, start, jnp.arange(max_steps))[1]


def initial_carry(step: Callable, shared, rows, state):
  """Returns (state, sums, ran_B) before the first step, with sums of 0."""
  _, added = jax.eval_shape(step, shared, rows, jnp.zeros((), jnp.int32), state)
  zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), added)
  return state, zeros, jnp.zeros(len(jax.tree.leaves(state)[0]))


def take_step(step: Callable, shared, rows, l, carry):
  """Returns (state, sums, ran_B) after step l, and what it added to the sums.

  Args:
    step: function with the arguments and results of DepthSteps.step.
    shared, rows, l: arguments of `step`.
    carry: (state, sums, ran_B) before step l.
  """
  state, sums, ran_B = carry
  state, added = step(shared, rows, l, state)
  return (state, jax.tree.map(jnp.add, sums, added), ran_B + 1), added


def split_floats(tree: Any) -> tuple[list, list, Callable[[list, list], Any]]:
  """Returns float leaves, other leaves, and a function that restores the tree.

  The function takes both lists. The leaves are separated because only floats
  have gradients.
  """
  leaves, structure = jax.tree.flatten(tree)
  is_float = [jnp.issubdtype(a.dtype, jnp.floating) for a in leaves]
  pick = lambda which: [
    a for a, f in zip(leaves, is_float, strict=True) if f == which
  ]

  def join(floats, others):
    floats, others = iter(floats), iter(others)
    return structure.unflatten(next(floats if f else others) for f in is_float)

  return pick(True), pick(False), join


class _Static:
  """The part of a loop that is neither traced nor differentiated."""

  def __init__(self, steps: DepthSteps, join: Callable, max_steps: int):
    self.steps, self.join, self.max_steps = steps, join, max_steps

  def step(self, floats, others, l, state):
    return self.steps.step(*self.join(floats, others), l, state)

  def continues(self, l, state):
    return (l < self.max_steps) & jnp.any(self.steps.active(state))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _while(static: _Static, floats, others, state):
  def body(carry):
    l, carry = carry
    return l + 1, take_step(static.step, floats, others, l, carry)[0]

  continues = lambda carry: static.continues(carry[0], carry[1][0])
  carry = initial_carry(static.step, floats, others, state)
  start = jnp.zeros((), jnp.int32), carry
  return jax.lax.while_loop(continues, body, start)[1]


def _forward(static: _Static, floats, others, state):
  def body(carry):
    l, last, carry, recorded = carry
    record = lambda all_, a: jax.lax.dynamic_update_index_in_dim(all_, a, l, 0)
    recorded = jax.tree.map(record, recorded, carry[0])
    carry, added = take_step(static.step, floats, others, l, carry)
    last = jnp.where(jnp.any(static.steps.changed(added)), l, last)
    return l + 1, last, carry, recorded

  continues = lambda carry: static.continues(carry[0], carry[2][0])
  carry = initial_carry(static.step, floats, others, state)
  empty = lambda a: jnp.zeros((static.max_steps, *a.shape), a.dtype)
  zero = jnp.zeros((), jnp.int32)
  start = zero, zero - 1, carry, jax.tree.map(empty, state)
  _, last, carry, recorded = jax.lax.while_loop(continues, body, start)
  return carry, (floats, others, recorded, last)


def _backward(static: _Static, residuals, gradients):
  floats, others, recorded, last = residuals
  d_state, d_sums, _ = gradients

  def body(carry):
    l, d_state, d_floats = carry
    before = jax.tree.map(
      lambda all_: jax.lax.dynamic_index_in_dim(all_, l, 0, False), recorded
    )
    _, pull = jax.vjp(
      lambda floats, state: static.step(floats, others, l, state),
      floats,
      before,
    )
    more, d_state = pull((d_state, d_sums))
    return l - 1, d_state, jax.tree.map(jnp.add, d_floats, more)

  # Sums over steps are float32, whatever the dtype of the terms.
  wide = lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32))
  start = last, d_state, jax.tree.map(wide, floats)
  _, d_state, d_floats = jax.lax.while_loop(lambda c: c[0] >= 0, body, start)
  narrow = lambda total, a: total.astype(a.dtype)
  return jax.tree.map(narrow, d_floats, floats), None, d_state


_while.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _compacted(static: _Static, floats, others, state):
  steps, (shared, rows) = static.steps, static.join(floats, others)
  carry = initial_carry(steps.step, shared, rows, state)
  l = jnp.zeros((), jnp.int32)
  return _compact(steps, shared, rows, l, carry, static.max_steps)


_compacted.defvjp(_forward, _backward)


def _compact(steps, shared, rows, l, carry, max_steps):
  """Runs steps until half of the rows have halted, then for the others alone.

  This repeats with the other rows, down to a single row.

  Args:
    steps, shared, rows, max_steps: as in compacted_loop.
    l: the next step, from 0.
    carry: (state, sums, ran_B) before this step.

  Returns:
    The carry after the last step.
  """
  half = len(carry[2]) // 2

  def continues(carry):
    l, (state, _, _) = carry
    return (l < max_steps) & (jnp.sum(steps.active(state)) > half)

  def body(carry):
    l, carry = carry
    return l + 1, take_step(steps.step, shared, rows, l, carry)[0]

  l, carry = jax.lax.while_loop(continues, body, (l, carry))
  if not half:
    return carry
  rest_S = jnp.argsort(~steps.active(carry[0]), stable=True)[:half]
  pick = lambda tree: jax.tree.map(lambda a: a[rest_S], tree)
  part = _compact(steps, shared, pick(rows), l, pick(carry), max_steps)
  put = lambda a, b: a.at[rest_S].set(b)
  return jax.tree.map(put, carry, part)
