"""The rows of the memorizing bench, at a size that compiles quickly."""

import jax
import numpy as np
import pytest

from meliad_rec.archs.memorizing import Ring
from meliad_rec.benchmarks import memorizing
from tests.architectures import config
from tests.architectures import H
from tests.architectures import K
from tests.architectures import W

ROWS, T = 2, 3 * W
TINY = memorizing.Setting(
  config(),
  layers=2,
  memories=(4 * W, 9 * W),
  neighbors=5,
  recall_target=0.9,
  rows=ROWS,
  segment=T,
  vocab=13,
)


@pytest.mark.slow
def test_a_row_for_each_search_of_each_memory():
  rows = memorizing.measure(TINY, 1)
  xl = rows.pop(memorizing.BASELINE)
  assert xl.step.ratio == 1
  assert list(rows) == [
    f'{memory}: {search}'
    for memory in TINY.memories
    for search in ('5 nearest', '5, approximate', 'all')
  ]
  for name, row in rows.items():
    # Keys and values of the memory and a segment, each with its mask, and the
    # place of the next.
    places = int(name.split(':')[0]) + T
    ring = ROWS * (places * (2 * 4 * H * K + 1) + 4)
    assert row.state_bytes == xl.state_bytes + ring
    assert row.step.flops > xl.step.flops


def test_a_run_begins_with_full_memories():
  cell = memorizing.cells(TINY)['72: 5 nearest']
  program = memorizing.program(TINY, cell)
  state = program.create(1)
  (ring,) = (
    leaf
    for leaf in jax.tree.leaves(
      state.carry, is_leaf=lambda a: isinstance(a, Ring)
    )
    if isinstance(leaf, Ring)
  )
  assert ring.mask.all() and ring.keys.shape[2] == 9 * W + T
  assert np.unique(ring.keys).size > ring.keys.size / 2
  facts = lambda a: (a.shape, a.dtype)
  assert jax.tree.map(facts, state) == jax.tree.map(facts, program.shapes)


def test_settings_hold_whole_windows():
  for setting in memorizing.SETTINGS.values():
    for tokens in (*setting.memories, setting.segment):
      assert tokens % setting.config.window == 0
