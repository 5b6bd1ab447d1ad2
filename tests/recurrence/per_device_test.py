"""Each device takes the steps that its rows need; gradients stay the same."""

import functools

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from meliad_rec.distributed import partition
from meliad_rec.recurrence.early_exit import compacted_loop
from meliad_rec.recurrence.early_exit import cond_loop
from meliad_rec.recurrence.early_exit import masked_loop
from meliad_rec.recurrence.early_exit import per_device
from meliad_rec.recurrence.early_exit import while_loop
from tests.stepping import assert_same
from tests.stepping import given
from tests.stepping import MOST
from tests.stepping import outcome
from tests.stepping import Toy

ROWS = 16
NEED = np.array([0, 1, 5, 2, 0, 0, 3, 3, 1, 0, 2, 2, 0, 4, 1, 0])


def steps_of(places):
  """Those that each row is computed for, if so many places halt apart."""
  need = np.append(NEED[:-1] + 1, 0)  # The last row is dead.
  return np.repeat(need.reshape(places, -1).max(1), ROWS // places)


def on_mesh(loop, shape):
  """What `outcome` gives on a mesh that cuts w too, and the program."""
  shared, rows, state = given(NEED, rows=ROWS)
  mesh = partition.make_mesh(*shape)
  whole, cut = PartitionSpec(), PartitionSpec(partition.BATCH_AXES)
  put = lambda tree, spec: jax.tree.map(
    lambda a: jax.device_put(a, NamedSharding(mesh, spec)), tree
  )
  with jax.set_mesh(mesh):
    given_ = put(shared, whole), put(rows, cut), put(state, cut)
    given_[0]['w'] = put(shared['w'], PartitionSpec(None, 'model'))
    step = jax.jit(functools.partial(outcome, loop))
    compiled = step.lower(*given_).compile()
    return compiled(*given_), compiled.as_text()


@functools.cache
def alone():
  return jax.jit(functools.partial(outcome, masked_loop))(
    *given(NEED, rows=ROWS)
  )


def check(loop, shape, places):
  ((state, sums, ran_B), gradients), text = on_mesh(loop, shape)
  (expected_state, expected, _), reference = alone()
  assert_same(
    (state, sums, gradients), (expected_state, expected, reference), 2e-6
  )
  np.testing.assert_array_equal(ran_B, steps_of(places))
  return text


def test_devices_end_at_different_steps():
  """And speak to each other once: of the gradient of w."""
  assert len(set(steps_of(8))) > 3
  text = check(per_device(while_loop), (8, 1, 1), 8)
  assert text.count('all-reduce(') == 1


def test_without_it_all_take_those_of_the_slowest():
  text = check(while_loop, (8, 1, 1), 1)
  assert text.count('all-reduce(') > 1


@pytest.mark.parametrize(
  'loop', [while_loop, cond_loop], ids=lambda f: f.__name__
)
@pytest.mark.parametrize('shape, places', [((2, 2, 2), 4), ((1, 4, 2), 4)])
def test_beside_an_axis_that_cuts_a_step(loop, shape, places):
  """Steps then hold collectives, over devices that take as many of them."""
  text = check(per_device(loop), shape, places)
  assert text.count('all-gather(') > 0


def test_rows_leave_each_device_by_themselves():
  """Compacted, over the rows of each device."""
  given_ = given(NEED, rows=ROWS)
  mesh = partition.make_mesh(4, devices=jax.devices()[:4])
  run = lambda loop: jax.jit(functools.partial(loop, Toy(), most=MOST))(*given_)
  with jax.set_mesh(mesh):
    *found, ran_B = run(per_device(compacted_loop))
  *expected, _ = run(masked_loop)
  assert_same(found, expected, 2e-7)
  assert (ran_B <= steps_of(4)).all() and ran_B.sum() < steps_of(4).sum()


def test_where_no_axis_cuts_rows_it_is_the_loop():
  given_ = given(NEED, rows=ROWS)
  run = jax.jit(functools.partial(per_device(while_loop), Toy(), most=MOST))
  expected = run(*given_)
  with jax.set_mesh(partition.make_mesh(1, 1, 8)):
    found = run(*given_)
  assert_same(found, expected)
  np.testing.assert_array_equal(found[2], steps_of(1))


def test_rows_that_do_not_divide_are_run_as_they_are():
  """As a prompt is, which is one row, on a mesh for training."""
  shared, rows, state = given(NEED[2:5], rows=3)
  loop = per_device(while_loop)
  with jax.set_mesh(partition.make_mesh(8)):
    found = jax.jit(functools.partial(outcome, loop))(shared, rows, state)
  expected = jax.jit(functools.partial(outcome, masked_loop))(
    shared, rows, state
  )
  assert_same((found[0][:2], found[1]), (expected[0][:2], expected[1]), 2e-6)
