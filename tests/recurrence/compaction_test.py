"""Rows that halted leave: the same results for less work."""

import functools

import jax
import numpy as np
import pytest

from meliad_rec.recurrence.early_exit import compacted_loop
from meliad_rec.recurrence.early_exit import masked_loop
from tests.stepping import assert_same
from tests.stepping import given
from tests.stepping import MOST
from tests.stepping import Toy

# Of unlike numbers of rows, powers of two or not; the last row is dead.
ROWS = {
  'eight': [5, 0, 1, 1, 6, 0, 2, 9],
  'seven': [0, 1, 2, 3, 4, 5, 0],
  'one alone': [3],
  'one alive': [3, 0],
  'all deep': [9, 9, 9, 9, 9],
  'none': [0, 0, 0],
}


def computed(need):
  """Steps for which each row is computed, by hand."""
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
  assert_same(found, expected, 2e-7)
  np.testing.assert_array_equal(ran_B, computed(need))


def test_work_is_less_than_that_of_all_rows():
  need = np.array(ROWS['eight'])
  steps = min(max(need[:-1]) + 1, MOST)
  work = computed(need).sum()
  # At least the steps that are needed, and at most twice as many.
  needed = np.minimum(need[:-1] + 1, MOST).sum()
  assert needed <= work <= 2 * needed
  assert work < 0.7 * steps * len(need)
