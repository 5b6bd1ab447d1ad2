"""The rows of the recurrence bench, at a size that compiles quickly."""

import pytest

from meliad_rec.benchmarks import recurrence
from meliad_rec.benchmarks import training
from meliad_rec.metrics.flops import forward_flops
from meliad_rec.models.model import Model
from tests.architectures import config
from tests.architectures import W

TINY = recurrence.Setting(
  config(), layers=2, passes=4, rows=2, segment=3 * W, vocab=13
)


@pytest.mark.parametrize('name', recurrence.cells(TINY))
def test_counted_products_are_those_of_the_formula_and_some(name):
  cell = recurrence.cells(TINY)[name]
  program = training.program(
    Model(TINY.vocab, cell, TINY.config.d_model),
    TINY.rows,
    TINY.segment,
  )
  shapes = program.shapes
  batch = program.batch_shapes(TINY.rows)
  counted = 3 * forward_flops(
    program.forward, shapes.params, shapes.carry, batch
  )
  closed = recurrence.closed_flops(TINY)[name]
  # Beside the band: whole blocks of queries, and keys that are made again.
  assert closed <= counted <= 1.6 * closed


def test_every_row_has_its_formula(monkeypatch):
  found = training.Row(None, 1.0, 1, 2, 3, 4.0, 5)
  monkeypatch.setattr(
    training,
    'measure',
    lambda programs, baseline, rounds: dict.fromkeys(programs, found),
  )
  rows = recurrence.measure(TINY, 1)
  assert recurrence.BASELINE in rows
  assert all(row.closed_flops > 0 for row in rows.values())


def test_settings_hold_whole_chunks():
  for setting in recurrence.SETTINGS.values():
    chunk, rest = divmod(setting.config.window, setting.passes)
    assert not rest and not setting.segment % chunk
