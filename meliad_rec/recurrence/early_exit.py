"""A step repeated until no row goes on, and its gradient: early exit.

Jax has no gradient of a loop whose length is not known. Here the forward pass
is a while loop that notes the state each step began with, and the backward pass
is another, which computes each step again: the time of the steps that were
taken, and the memory of one of them beside the notes.

Every loop takes (steps, shared, rows, state, most). `shared` (parameters, keys)
is of no row; every leaf of `rows`, of the state and of what steps add up is
[B, ...]. States and sums are floats. Results are (state, sums, steps each row
was computed for), the last of them [B] float32.

A pytree's floats apart from its other leaves, which have no gradient.

Early exit of each row by itself, for inference: rows that halted leave.

As soon as half of the rows have halted, the others go on in an array of half
the size, and so on down to one row: shapes are static, and the program is one.

Early exit of each device by itself, under a mesh.

Jit over a mesh asks in each step whether any row goes on, on whatever device,
and all devices take as many steps as the slowest. Under shard_map over the axes
that cut the rows, each takes those that its own rows need. Nothing in a step
may then be added up over these axes, since another device may have left the
loop: parameters come in whole along them. Other axes, such as 'model', stay
with the compiler; devices along those hold the same rows, and so agree.
"""

from collections.abc import Callable
import functools
import math
from typing import Any
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meliad_rec.distributed.partition import BATCH_AXES


def split(tree: Any) -> tuple[list, list, Callable[[list, list], Any]]:
  """Floats, other leaves, and how the tree is put together again."""
  leaves, structure = jax.tree.flatten(tree)
  is_float = [jnp.issubdtype(a.dtype, jnp.floating) for a in leaves]
  pick = lambda which: [
    a for a, f in zip(leaves, is_float, strict=True) if f == which
  ]

  def join(floats, others):
    floats, others = iter(floats), iter(others)
    return structure.unflatten(next(floats if f else others) for f in is_float)

  return pick(True), pick(False), join


class Steps(Protocol):
  """What is repeated. It must hold no array of its own."""

  def step(self, shared, rows, l, state) -> tuple[Any, Any]:
    """The state behind step l, and what it adds.

    A row that does not go on keeps its state, and adds 0.
    """

  def alive(self, state) -> jax.Array:
    """Rows that go on, [B] bool."""

  def took(self, added) -> jax.Array:
    """Rows that a step, which added this, changed at all, [B] bool.

    A step in which rows only find out that they halt needs no gradient.
    """


def while_loop(steps: Steps, shared, rows, state, most: int):
  """At most so many steps; ends early in training too. No forward mode."""
  floats, others, join = split((shared, rows))
  return _while(_Run(steps, join, most), floats, others, state)


def cond_loop(steps: Steps, shared, rows, state, most: int):
  """As while_loop, by jax's own gradients: a scan over steps, taken or not."""

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def body(carry, l):
    goes_on = jnp.any(steps.alive(carry[0]))
    take = lambda carry: _take(steps.step, shared, rows, l, carry)[0]
    return jax.lax.cond(goes_on, take, lambda carry: carry, carry), None

  carry = _begin(steps.step, shared, rows, state)
  return jax.lax.scan(body, carry, jnp.arange(most))[0]


def fixed_loop(steps: Steps, shared, rows, state, most: int):
  """All steps, whether a row goes on or not, with the memory of one."""
  again = jax.checkpoint(steps.step, prevent_cse=False)
  return _all(again, shared, rows, state, most)


def masked_loop(steps: Steps, shared, rows, state, most: int):
  """All steps, and the memory of all: the reference."""
  return _all(steps.step, shared, rows, state, most)


def _all(step, shared, rows, state, most):
  def body(carry, l):
    return _take(step, shared, rows, l, carry)[0], None

  carry = _begin(step, shared, rows, state)
  return jax.lax.scan(body, carry, jnp.arange(most))[0]


def _begin(step, shared, rows, state):
  """What is carried before the first step."""
  _, added = jax.eval_shape(step, shared, rows, jnp.zeros((), jnp.int32), state)
  zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), added)
  return state, zeros, jnp.zeros(len(jax.tree.leaves(state)[0]))


def _take(step, shared, rows, l, carry):
  """What is carried behind a step, and what the step added."""
  state, sums, ran_B = carry
  state, added = step(shared, rows, l, state)
  return (state, jax.tree.map(jnp.add, sums, added), ran_B + 1), added


class _Run:
  """What is not differentiated, and no array."""

  def __init__(self, steps: Steps, join: Callable, most: int):
    self.steps, self.join, self.most = steps, join, most

  def step(self, floats, others, l, state):
    return self.steps.step(*self.join(floats, others), l, state)

  def goes_on(self, l, state):
    return (l < self.most) & jnp.any(self.steps.alive(state))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _while(run: _Run, floats, others, state):
  def body(carry):
    l, carry = carry
    return l + 1, _take(run.step, floats, others, l, carry)[0]

  goes_on = lambda carry: run.goes_on(carry[0], carry[1][0])
  carry = _begin(run.step, floats, others, state)
  start = jnp.zeros((), jnp.int32), carry
  return jax.lax.while_loop(goes_on, body, start)[1]


def _forward(run: _Run, floats, others, state):
  def body(carry):
    l, last, carry, notes = carry
    note = lambda all_, a: jax.lax.dynamic_update_index_in_dim(all_, a, l, 0)
    notes = jax.tree.map(note, notes, carry[0])
    carry, added = _take(run.step, floats, others, l, carry)
    last = jnp.where(jnp.any(run.steps.took(added)), l, last)
    return l + 1, last, carry, notes

  goes_on = lambda carry: run.goes_on(carry[0], carry[2][0])
  carry = _begin(run.step, floats, others, state)
  empty = lambda a: jnp.zeros((run.most, *a.shape), a.dtype)
  zero = jnp.zeros((), jnp.int32)
  start = zero, zero - 1, carry, jax.tree.map(empty, state)
  _, last, carry, notes = jax.lax.while_loop(goes_on, body, start)
  return carry, (floats, others, notes, last)


def _backward(run: _Run, kept, gradients):
  floats, others, notes, last = kept
  of_state, of_sums, _ = gradients

  def body(carry):
    l, of_state, of_floats = carry
    began = jax.tree.map(
      lambda all_: jax.lax.dynamic_index_in_dim(all_, l, 0, False), notes
    )
    _, pull = jax.vjp(
      lambda floats, state: run.step(floats, others, l, state), floats, began
    )
    more, of_state = pull((of_state, of_sums))
    return l - 1, of_state, jax.tree.map(jnp.add, of_floats, more)

  # Sums over steps are float32, whatever is summed.
  wide = lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32))
  start = last, of_state, jax.tree.map(wide, floats)
  _, of_state, of_floats = jax.lax.while_loop(lambda c: c[0] >= 0, body, start)
  narrow = lambda total, a: total.astype(a.dtype)
  return jax.tree.map(narrow, of_floats, floats), None, of_state


_while.defvjp(_forward, _backward)


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


def per_device(loop: Callable) -> Callable:
  """A loop of loop.py or compaction.py, run by each device for its rows.

  Where there is no mesh, or none that cuts the rows evenly, the loop as it is.
  """

  def run(steps, shared, rows, state, most):
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(a for a in BATCH_AXES if dict(mesh.shape).get(a, 1) > 1)
    count = math.prod(mesh.shape[axis] for axis in axes)
    if not axes or len(jax.tree.leaves(state)[0]) % count:
      return loop(steps, shared, rows, state, most)
    own = PartitionSpec(axes)
    return jax.shard_map(
      lambda shared, rows, state: loop(steps, shared, rows, state, most),
      in_specs=(PartitionSpec(), own, own),
      out_specs=own,
      axis_names=set(axes),
      check_vma=False,
    )(shared, rows, state)

  return run
