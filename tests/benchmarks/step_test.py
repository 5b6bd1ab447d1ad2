"""The rows of the step bench, at a size that compiles quickly."""

import ast
from pathlib import Path
import re

import jax
import pytest

from meliad_rec.benchmarks import step
from meliad_rec.benchmarks import training
from tests.architectures import config
from tests.architectures import W

GIN = Path(__file__).parents[2] / 'gin'
TINY = step.Setting(
  config(dropout=0.1),
  layers=2,
  recurrent_at=-1,
  slots=3,
  rows=2,
  segment=3 * W,
  vocab=13,
)


def test_rows_are_compared_with_one_more_layer(monkeypatch):
  given = lambda programs, baseline, rounds: (set(programs), baseline, rounds)
  monkeypatch.setattr(training, 'measure', given)
  assert step.measure(TINY, 2) == (set(step.CELLS), 'slide L+1', 2)


def test_small_is_the_size_of_that_name():
  text = (GIN / 'size' / 'small.gin').read_text()
  macros = re.findall(r'^(\w+) = (.*)$', text, re.MULTILINE)
  macros = {name: ast.literal_eval(value) for name, value in macros}
  s = step.SETTINGS['small']
  assert macros == {
    'D_MODEL': s.config.d_model,
    'NUM_HEADS': s.config.num_heads,
    'HEAD_DIM': s.config.head_dim,
    'MLP_DIM': s.config.mlp_dim,
    'LAYERS': s.layers,
    'WINDOW': s.config.window,
    'RECURRENT_LAYERS': (s.recurrent_at,),
    'SLOTS': s.slots,
    'SEGMENT': s.segment,
    'BATCH': s.rows,
    'DROPOUT': s.config.dropout,
    'DTYPE': s.config.dtype,
  }


def test_xl_reads_the_same_tokens_in_segments_of_one_window():
  cell = step.CELLS['xl L'](TINY)
  program = step.program(TINY, cell, one_window=True)
  assert (program.rows, program.segment) == (6, W)


@pytest.mark.parametrize('name', step.CELLS)
def test_every_row_is_a_model(name):
  program = step.program(TINY, step.CELLS[name](TINY))
  shapes = program.shapes
  logits = jax.eval_shape(
    program.forward, shapes.params, shapes.carry, program.batch_shapes(2)
  )[1]
  assert logits.shape == (2, 3 * W, 13)


def test_settings_hold_whole_blocks():
  for setting in step.SETTINGS.values():
    assert setting.segment % setting.config.window == 0
