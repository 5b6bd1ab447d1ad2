"""The rows of the generation bench, at a size that compiles quickly."""

import pytest

from meliad_rec.benchmarks import generation
from meliad_rec.benchmarks import recurrence
from meliad_rec.models.model import Model
from tests.architectures import config
from tests.architectures import D
from tests.architectures import H
from tests.architectures import K
from tests.architectures import W

TINY = recurrence.Setting(
  config(), layers=2, passes=4, rows=2, segment=3 * W, vocab=13
)


@pytest.mark.slow
def test_a_row_for_each_model_of_the_recurrence_bench():
  rows = generation.measure(TINY, 2)
  assert list(rows) == list(recurrence.cells(TINY))
  assert rows[generation.BASELINE].ratio == 1
  for row in rows.values():
    assert len(row.times.wall) == 2 and min(row.times.wall) > 0
    assert row.held_bytes >= row.state_bytes


def test_what_is_saved_and_what_is_held():
  state, held = (
    {
      name: generation.state_bytes(Model(13, cell, D), TINY.segment, held=held)
      for name, cell in recurrence.cells(TINY).items()
    }
    for held in (False, True)
  )
  # Keys and values of each layer; what one memory holds; each with its mask.
  assert state['xl'] == 2 * W * (2 * 4 * H * K + 1)
  assert state['feedback'] == W * (4 * D + 1)
  C = W // 4
  assert state['cached staircase'] == (W - C) * (4 * D + 1)
  # Beside it keys and values, and room for those of what is being written.
  more = {name: held[name] - state[name] for name in held}
  pair = 4 * 2 * H * K
  assert more['xl'] == 0
  assert more['feedback'] == 2 * more['feedback shared'] == 2 * pair * (W + 1)
  # Of 2 layers; what the chunk writes, the masks, and how full it is.
  assert more['cached staircase'] == (
    2 * pair * (W - C + 2 * C - 1) + C * 4 * D + W + 4
  )
  passes = sum((4 - 1 - n) * C + 2 * C - 1 for n in range(4))
  assert more['staircase'] == 2 * pair * passes + 3 * 2 * C * 4 * D + W + 4


def test_columns_are_of_one_token():
  row = generation.Row(
    generation.Times([0.64, 0.64], [1.0, 1.0]),
    0.5,
    rows=4,
    state_bytes=512,
    held_bytes=768,
  )
  found = row.columns('xl')
  assert found['ms/token'] == '10.000' and found['tokens/s'] == '400'
  assert found['/ xl'] == '0.500' and found['state KiB'] == '0.5'
  assert found['held KiB'] == '0.8'
