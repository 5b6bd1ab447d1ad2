"""Each setting gives its table."""

import dataclasses

import pytest

from meliad_rec.benchmarks import halting
from meliad_rec.benchmarks.halting import compiled
from meliad_rec.commands import bench

TINY = {'rows': 4, 'tokens': 6, 'd_model': 8}


def tiny(name, **changes):
  return dataclasses.replace(halting.SETTINGS[name], **TINY, **changes)


def test_a_row_for_each_loop_at_each_depth():
  depths = ((2,), 5), ((6,), 5)
  setting = tiny('exit', loops=('masked', 'while'), depths=depths)
  rows = halting.measure(setting, 1)
  assert {name: row.steps for name, row in rows.items()} == {
    'masked, 2 of 5': 1,
    'while, 2 of 5': 1,
    'masked, 6 of 5': 5,
    'while, 6 of 5': 5,
  }
  assert rows['masked, 2 of 5'].ratio == 1
  least, most = rows['while, 2 of 5'], rows['masked, 2 of 5']
  assert least.temporary_bytes < most.temporary_bytes


@pytest.mark.parametrize('name, mib', [('exit', 32), ('chunks', 6)])
def test_what_a_loop_that_ends_needs(name, mib):
  """Of a whole setting, by its plan: 20 steps at most, found in the third.

  Each of the 16 chunks has the notes of 20 steps, as it is causal: others of 4
  tokens take 5 at most.
  """
  setting = halting.SETTINGS[name]
  assert setting.causal or setting.tokens >= 20
  program, _ = compiled(setting, 'while', (3,), 20)
  assert program.memory_analysis().temp_size_in_bytes <= mib * 2**20


def test_what_never_halts_takes_all_steps():
  rows = halting.measure(tiny('depth', depths=(((2,), 4),)), 1)
  assert {name: row.steps for name, row in rows.items()} == {
    'never, 4 of 4': 4,
    'while, 2 of 4': 1,
  }


@pytest.mark.slow
def test_epochs_are_reckoned():
  depth = tiny('depth', loops=('while',), depths=(((2,), 4),))
  (row,) = halting.measure(depth, 2).values()
  assert row.epoch_seconds == row.times.median * 79_500 / 4
  text = bench.table({'a': row}, halting.BASELINE)
  assert 'epoch min' in text and '/ first' in text
