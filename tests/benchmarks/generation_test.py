"""The rows of the generation bench, at a size that compiles quickly."""

import pytest

from meliad_rec.benchmarks import generation
from meliad_rec.benchmarks import recurrence
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
  state = {name: row.state_bytes for name, row in rows.items()}
  # Keys and values of each layer; what one memory holds; each with its mask.
  assert state['xl'] == 2 * W * (2 * 4 * H * K + 1)
  assert state['feedback'] == W * (4 * D + 1)
  assert state['cached staircase'] == (W - W // 4) * (4 * D + 1)


def test_columns_are_of_one_token():
  row = generation.Row(
    generation.Times([0.64, 0.64], [1.0, 1.0]), 0.5, rows=4, state_bytes=512
  )
  found = row.columns('xl')
  assert found['ms/token'] == '10.000' and found['tokens/s'] == '400'
  assert found['/ xl'] == '0.500' and found['state KiB'] == '0.5'
