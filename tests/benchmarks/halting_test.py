"""Rows halt in the steps that they are told to; each setting has a table."""

import dataclasses

import numpy as np
import pytest

from meliad_rec.benchmarks import halting
from meliad_rec.benchmarks.halting import compiled
from meliad_rec.commands import bench

TINY = {'rows': 4, 'tokens': 6, 'd_model': 8}


def tiny(name, **changes):
  return dataclasses.replace(halting.SETTINGS[name], **TINY, **changes)


def depths(loop, steps, most, **changes):
  """Steps that each row, or each chunk, took."""
  program, arguments = compiled(tiny('exit', **changes), loop, steps, most)
  return np.asarray(program(*arguments)[0])


@pytest.mark.slow
def test_rows_halt_in_turn():
  found = depths('compacted', (2, 9), 9, trains=False)
  # What a state says moves on with it, a little.
  assert found[0] == found[2] < found[1]
  assert found[1] == found[3]


@pytest.mark.slow
def test_each_chunk_halts():
  found = depths('while', (3,), 5, chunk=3)
  assert found.shape == (2, 4, 1) and (found == 2).all()


@pytest.mark.slow
def test_causal_chunks_take_more_steps_than_they_have_tokens():
  """Chunks that are not causal cannot, even if more steps are asked for."""
  chunks = {'chunk': 3, 'trains': False}
  found = depths('while', (9,), 8, causal=True, **chunks)
  assert found.shape == (2, 4, 3) and (found == 8).all()
  assert (depths('while', (9,), 8, **chunks) == 4).all()


@pytest.mark.slow
def test_a_row_for_each_loop_at_each_depth():
  """The step in which a row finds that it halts does not count."""
  rows = halting.measure(tiny('exit', depths=(((4,), 5), ((6,), 5))), 1)
  assert {name: row.depth for name, row in rows.items()} == {
    'no early exit, 4 of 5': 3,
    'while, 4 of 5': 3,
    'no early exit, 6 of 5': 5,
    'while, 6 of 5': 5,
  }
  assert rows['no early exit, 4 of 5'].ratio == 1


@pytest.mark.parametrize(
  'name, mib', [pytest.param('exit', 32, marks=pytest.mark.slow), ('chunks', 6)]
)
def test_what_a_loop_that_ends_needs(name, mib):
  """Checks the memory of a whole setting: at most 20 steps, halting in step 3.

  Each of the 16 chunks records 20 steps, because it is causal: other chunks of
  4 tokens take at most 5.
  """
  setting = halting.SETTINGS[name]
  assert setting.causal or setting.tokens >= 20
  program, _ = compiled(setting, 'while', (3,), 20)
  assert program.memory_analysis().temp_size_in_bytes <= mib * 2**20


def test_what_never_halts_takes_all_steps_and_epochs_are_reckoned():
  rows = halting.measure(tiny('depth', depths=(((2,), 4),)), 1)
  assert {name: row.depth for name, row in rows.items()} == {
    'never, 4 of 4': 4,
    'while, 2 of 4': 1,
  }
  row = rows['while, 2 of 4']
  assert row.epoch_seconds == row.times.median * 79_500 / 4
  text = bench.table({'a': row}, halting.BASELINE)
  assert 'epoch min' in text and '/ first' in text and ' depth ' in text


def test_loops_are_options_of_the_model():
  """Training uses no 'compacted' loop, so it cannot be measured there."""
  early_exit = {
    loop: halting.cell(tiny('exit'), loop, 5).encoder.early_exit
    for loop in ('no early exit', 'while')
  }
  assert early_exit == {'no early exit': False, 'while': True}
  with pytest.raises(ValueError, match='trains=False'):
    compiled(tiny('exit'), 'compacted', (3,), 5)
