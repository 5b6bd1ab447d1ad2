"""Benchmarks at sizes that compile quickly, except attention and halting."""

import jax
import numpy as np
import pytest

from meliad_rec.archs.memorizing import Ring
from meliad_rec.benchmarks import attention
from meliad_rec.benchmarks import generation
from meliad_rec.benchmarks import memorizing
from meliad_rec.benchmarks import recurrence
from meliad_rec.benchmarks import step
from meliad_rec.benchmarks import training
from meliad_rec.benchmarks.round_robin import round_robin
from meliad_rec.benchmarks.round_robin import Times
from meliad_rec.config import files
from meliad_rec.config.values import statements
from meliad_rec.metrics.flops import forward_flops
from meliad_rec.models.model import Model
from tests.architectures import config
from tests.architectures import D
from tests.architectures import F
from tests.architectures import H
from tests.architectures import K
from tests.architectures import T
from tests.architectures import V
from tests.architectures import W
from tests.architectures import windowed

STEP = step.StepSizes(
  config(dropout=0.1),
  layers=2,
  recurrent_at=-1,
  slots=3,
  rows=2,
  segment=4 * W,
  vocab=13,
)


def test_calls_take_turns_after_one_call_each():
  order = []
  calls = {name: lambda name=name: order.append(name) for name in 'abc'}
  times = round_robin(calls, rounds=2)
  assert ''.join(order) == 'abc' * 3
  assert all(len(t.wall) == len(t.cpu) == 2 for t in times.values())
  with pytest.raises(ValueError, match='--rounds'):
    round_robin({'a': lambda: None}, 0)


def test_load_on_whole_rounds_cancels_out_of_the_ratio():
  slow, fast = Times([2.0, 20.0, 2.2], []), Times([1.0, 10.0, 1.1], [])
  assert slow.ratio(fast) == pytest.approx(2)
  assert slow.median == 2.2
  # The spread is the interquartile range.
  assert Times([1.0, 2.0, 3.0, 4.0, 5.0], []).spread == pytest.approx(2 / 3)
  assert Times([1.0], []).spread == 0


def program(layers):
  return training.program(Model(V, windowed(layers), D), 2, T)


def test_rows_have_the_cost_of_a_step(monkeypatch):
  programs, seen = {f'{n} layers': program(n) for n in (1, 2)}, []
  compiled = programs['1 layers'].train_step

  class Spy:
    memory_analysis = compiled.memory_analysis

    def __call__(self, state, batch):
      seen.append(int(state.step))
      return compiled(state, batch)

  # Where cached_property stores it.
  programs['1 layers'].__dict__['train_step'] = Spy()
  one, two = training.measure(programs, '2 layers', rounds=3).values()
  assert seen == [0, 1, 2, 3]  # Each step continues from the one before.
  assert two.ratio == 1
  assert one.ratio == np.median(np.divide(one.times.wall, two.times.wall))
  for row in (one, two):
    assert len(row.times.wall) == 3
    assert row.tokens == 2 * T
    assert row.temporary_bytes > 0 and row.compile_seconds > 0
  weights = 4 * D * H * K + 2 * D * F
  assert two.parameters - one.parameters > weights
  # Forward and backward; attention reads at least the window.
  assert two.flops - one.flops >= 6 * 2 * T * (weights + 2 * W * H * K)
  assert two.flops < 2 * one.flops


@pytest.fixture
def unmeasured(monkeypatch):
  """Rows have the counted FLOP of their program; nothing runs."""

  def cost(p):
    shapes, batch = p.shapes, p.batch_shapes(p.rows)
    counted = forward_flops(p.forward, shapes.params, shapes.carry, batch)
    tokens = p.rows, p.segment
    return training.StepCost(None, 1.0, tokens, 3 * counted, 3, 4.0, 5)

  def measure(programs, baseline, rounds):
    assert baseline in programs
    return {name: cost(p) for name, p in programs.items()}

  monkeypatch.setattr(training, 'measure', measure)


@pytest.mark.slow
def test_every_row_is_a_model_of_the_same_tokens(unmeasured):
  rows = step.measure(STEP, 2)
  shapes = {name: row.tokens for name, row in rows.items()}
  # XL reads them in segments of one window.
  xl = {'xl L': (8, W), 'xl L 2W': (4, 2 * W), 'xl L 4W': (2, 4 * W)}
  assert shapes == dict.fromkeys(step.CELLS, (2, 4 * W)) | xl


def test_counted_flops_are_close_to_the_formula(unmeasured):
  for row in recurrence.measure(RECURRENCE, 1).values():
    # Counted in addition: masked parts of blocks, and recomputed keys.
    assert row.closed_flops <= row.flops <= 1.6 * row.closed_flops


def test_settings_are_whole_windows():
  for s in step.SETTINGS.values():
    assert s.segment % s.config.window == 0
  for s in attention.SETTINGS.values():
    assert s.tokens % s.window == 0
  for s in recurrence.SETTINGS.values():
    chunk, rest = divmod(s.config.window, s.passes)
    assert not rest and not s.segment % chunk
  for s in memorizing.SETTINGS.values():
    assert not any(n % s.config.window for n in (*s.memories, s.segment))


def test_small_is_gin_size_small():
  text = (files.root() / 'size' / 'small.gin').read_text()
  macros = {one.selector: one.value for one in statements(text, str)}
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


RECURRENCE = recurrence.RecurrenceSizes(
  config(), layers=2, passes=4, rows=2, segment=3 * W, vocab=13
)


MEMORIZING = memorizing.MemorizingSizes(
  config(),
  layers=2,
  memories=(4 * W, 9 * W),
  neighbors=5,
  recall_target=0.9,
  rows=2,
  segment=3 * W,
  vocab=13,
)


def test_a_row_for_each_search_of_each_memory(unmeasured):
  rows = memorizing.measure(MEMORIZING, 1)
  xl = rows.pop(memorizing.BASELINE)
  assert list(rows) == [
    f'{memory}: {search}'
    for memory in MEMORIZING.memories
    for search in ('5 nearest', '5, approximate', 'all')
  ]
  for name, row in rows.items():
    # Keys, values and mask of the memory and a segment, and a position.
    slots = int(name.split(':')[0]) + 3 * W
    ring = 2 * (slots * (2 * 4 * H * K + 1) + 4)
    assert row.state_bytes == xl.state_bytes + ring
    assert row.step.flops > xl.step.flops


def test_a_run_begins_with_full_memories():
  cell = memorizing.cells(MEMORIZING)['72: 5 nearest']
  program = memorizing.program(MEMORIZING, cell)
  state = program.create(1)
  is_ring = lambda node: isinstance(node, Ring)
  (ring,) = filter(is_ring, jax.tree.leaves(state.carry, is_leaf=is_ring))
  assert ring.mask.all() and ring.keys.shape[2] == 9 * W + 3 * W
  assert np.unique(ring.keys).size > ring.keys.size / 2
  facts = lambda a: (a.shape, a.dtype)
  assert jax.tree.map(facts, state) == jax.tree.map(facts, program.shapes)


@pytest.mark.slow
def test_a_row_for_each_model_of_the_recurrence_bench():
  rows = generation.measure(RECURRENCE, 2)
  assert list(rows) == list(recurrence.cells(RECURRENCE))
  assert rows[generation.BASELINE].ratio == 1
  for row in rows.values():
    assert len(row.times.wall) == 2 and min(row.times.wall) > 0
    assert row.held_bytes >= row.state_bytes


def test_sizes_of_saved_and_held_states():
  of = lambda held: {
    name: generation.state_bytes(Model(13, cell, D), 3 * W, held)
    for name, cell in recurrence.cells(RECURRENCE).items()
  }
  state, held = of(False), of(True)
  # Keys and values of each layer, or one memory, with masks.
  assert state['xl'] == 2 * W * (2 * 4 * H * K + 1)
  assert state['feedback'] == W * (4 * D + 1)
  C = W // 4
  assert state['cached staircase'] == (W - C) * (4 * D + 1)
  # In addition, keys and values, with space for the new ones.
  more = {name: held[name] - state[name] for name in held}
  pair = 4 * 2 * H * K
  assert more['xl'] == 0
  assert more['feedback'] == 2 * more['feedback shared'] == 2 * pair * (W + 1)
  # 2 layers; the chunk that is written, masks, and a length.
  assert more['cached staircase'] == (
    2 * pair * (W - C + 2 * C - 1) + C * 4 * D + W + 4
  )
  passes = sum((4 - 1 - n) * C + 2 * C - 1 for n in range(4))
  assert more['staircase'] == 2 * pair * passes + 3 * 2 * C * 4 * D + W + 4


def test_columns_are_per_token():
  times = generation.Times([0.64, 0.64], [1.0, 1.0])
  found = generation.GenerationCost(times, 0.5, 4, 512, 768).columns('xl')
  assert found['ms/token'] == '10.000' and found['tokens/s'] == '400'
  assert found['/ xl'] == '0.500' and found['state KiB'] == '0.5'
  assert found['held KiB'] == '0.8'
