"""Rows halt in the steps that they are told to."""

import dataclasses

import numpy as np
import pytest

from meliad_rec.benchmarks import halting
from meliad_rec.benchmarks.halting import compiled


def depths(loop, steps, most, **changes):
  """Steps that each row, or each chunk, took."""
  setting = dataclasses.replace(
    halting.SETTINGS['exit'], rows=4, tokens=6, d_model=8, **changes
  )
  program, arguments = compiled(setting, loop, steps, most)
  return np.asarray(program(*arguments)[0])


@pytest.mark.parametrize('loop', ['masked', 'while'])
def test_all_halts_in_the_step_that_is_named(loop):
  # The step in which a row finds that it halts does not count.
  assert (depths(loop, (4,), 5) == 3).all()
  assert (depths(loop, (6,), 5) == 5).all()


def test_rows_halt_in_turn():
  found = depths('compacted', (2, 9), 9, trains=False)
  # What a state says moves on with it, a little.
  assert found[0] == found[2] < found[1]
  assert found[1] == found[3]


@pytest.mark.slow
def test_each_chunk_halts():
  found = depths('while', (3,), 5, chunk=3)
  assert found.shape == (2, 4, 1) and (found == 2).all()


def test_causal_chunks_take_more_steps_than_they_have_tokens():
  """Which others cannot, whatever is asked of them."""
  found = depths('while', (9,), 8, chunk=3, causal=True)
  assert found.shape == (2, 4, 3) and (found == 8).all()
  assert (depths('while', (9,), 8, chunk=3) == 4).all()
