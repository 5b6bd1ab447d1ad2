"""Step times of the models of the Block-Recurrent paper's Table 1.

All rows take the trainer's own training step, at one setting, and are measured
in turn. Hutchins et al. 2022, section 4.2: one recurrent layer costs about as
much as one more ordinary layer, so Slide with L + 1 layers is the baseline.
"""

from collections.abc import Callable
import dataclasses
import functools
import time

import jax
import numpy as np

from meliad_rec import gates
from meliad_rec import losses
from meliad_rec import partition
from meliad_rec.archs import stack
from meliad_rec.archs.block_feedback import BlockFeedback
from meliad_rec.archs.block_recurrent import BlockRecurrentLayer
from meliad_rec.archs.window import WindowLayer
from meliad_rec.benchmarks.round_robin import round_robin
from meliad_rec.benchmarks.round_robin import Times
from meliad_rec.cell import Cell
from meliad_rec.data.batch import Batch
from meliad_rec.layer_config import LayerConfig
from meliad_rec.metrics.flops import forward_flops
from meliad_rec.model import LanguageModel
from meliad_rec.optimizer import optimizer
from meliad_rec.optimizer import schedules
from meliad_rec.program import Program


@dataclasses.dataclass(frozen=True)
class Setting:
  """Sizes that all rows share.

  Attributes:
    config: of every layer.
    layers: L.
    recurrent_at: place of the recurrent layer.
    slots: state vectors.
    rows: of a batch, where the segment is the sliding one.
    segment: tokens of a row in a step.
    vocab: token ids.
  """

  config: LayerConfig
  layers: int
  recurrent_at: int
  slots: int
  rows: int
  segment: int
  vocab: int


SMALL = LayerConfig(
  d_model=256, heads=4, head_width=64, mlp_width=1024, window=128, dropout=0.05
)
SETTINGS = {
  # The setting at which the authors' own code was measured on a CPU.
  'meliad': Setting(SMALL, 4, 1, slots=128, rows=4, segment=512, vocab=256),
  # gin/size/small.gin, as launch/compare.sh trains it.
  'small': Setting(
    dataclasses.replace(SMALL, dropout=0.0),
    6,
    -3,
    slots=128,
    rows=4,
    segment=1024,
    vocab=259,
  ),
  # The paper's depth and its 8 blocks a segment.
  '12l': Setting(SMALL, 12, -3, slots=128, rows=2, segment=1024, vocab=256),
}


def slide(s: Setting, more: int = 0) -> Cell:
  return stack.layers(s.layers + more, lambda: WindowLayer(s.config))


def recurrent(s: Setting, gate: Callable, gate_config: str) -> Cell:
  special = functools.partial(
    BlockRecurrentLayer, s.config, s.slots, gate, gate_config, remat='full'
  )
  layer = lambda: WindowLayer(s.config)
  return stack.layers(s.layers, layer, special, (s.recurrent_at,))


def feedback(s: Setting) -> Cell:
  return BlockFeedback(
    s.config, s.layers, (s.recurrent_at,), s.slots, remat='full'
  )


BASELINE = 'slide L+1'
CELLS = {
  'slide L': slide,
  BASELINE: functools.partial(slide, more=1),
  'xl L': slide,  # With a segment of one window.
  'rec fixed:skip': functools.partial(
    recurrent, gate=gates.FixedGate, gate_config='skip'
  ),
  'rec fixed:dual': functools.partial(
    recurrent, gate=gates.FixedGate, gate_config='dual'
  ),
  'rec lstm:dual': functools.partial(
    recurrent, gate=gates.LSTMGate, gate_config='dual'
  ),
  'feedback fixed:skip': feedback,
}


@dataclasses.dataclass(frozen=True)
class Row:
  """What one model's training step costs.

  Attributes:
    times: of a step, seconds.
    ratio: of the step time to the baseline's.
    tokens: of a step.
    flops: of a step's matrix products, 3 times those of its forward pass.
    temporary_bytes: as the compiler plans them, beside state and batch.
    compile_seconds: tracing included.
    parameters: their number.
  """

  times: Times
  ratio: float
  tokens: int
  flops: int
  temporary_bytes: int
  compile_seconds: float
  parameters: int


def measure(
  setting: Setting, rounds: int, cells: dict[str, Callable] = CELLS
) -> dict[str, Row]:
  """A row for each model; the baseline must be among them."""
  programs = {
    name: program(setting, cell(setting), name.startswith('xl'))
    for name, cell in cells.items()
  }
  compile_seconds = {name: _compile(p) for name, p in programs.items()}
  times = round_robin({n: _stepper(p) for n, p in programs.items()}, rounds)
  return {
    name: Row(
      times=times[name],
      ratio=times[name].ratio(times[BASELINE]),
      tokens=p.rows * p.segment,
      flops=3
      * forward_flops(
        p.forward, p.shapes.params, p.shapes.carry, p.batch_shapes(p.rows)
      ),
      temporary_bytes=p.train_step.memory_analysis().temp_size_in_bytes,
      compile_seconds=compile_seconds[name],
      parameters=sum(a.size for a in jax.tree.leaves(p.shapes.params)),
    )
    for name, p in programs.items()
  }


def program(setting: Setting, cell: Cell, one_window: bool = False) -> Program:
  """A run's program; with segments of one window, and more rows, for XL."""
  config = setting.config
  segment = config.window if one_window else setting.segment
  return Program(
    model=LanguageModel(setting.vocab, cell, config.d_model, config.dropout),
    optimizer=optimizer.chain(optimizer.adafactor, schedules.rsqrt(1000)),
    objective=losses.objective,
    mesh=partition.make_mesh(devices=jax.devices()[:1]),
    rows=setting.rows * setting.segment // segment,
    segment=segment,
  )


def _compile(p: Program) -> float:
  began = time.perf_counter()
  _ = p.train_step
  return time.perf_counter() - began


def _stepper(p: Program) -> Callable[[], None]:
  """Takes one training step a call, each on the state of the one before."""
  shape = p.rows, p.segment
  vocab = p.model.vocab
  tokens_BT = np.random.default_rng(0).integers(1, vocab, shape, np.int32)
  batch = Batch(
    tokens_BT=tokens_BT,
    targets_BT=np.roll(tokens_BT, -1, 1),
    mask_BT=np.ones(shape, bool),
    start_B=np.arange(p.rows) == 0,
    document_B=np.zeros(p.rows, np.int32),
    offset_B=np.zeros(p.rows, np.int32),
  )
  batch = p.put(batch, p.rows)
  state = p.create(seed=0)

  def step():
    nonlocal state
    state, sums = p.train_step(state, batch)
    jax.block_until_ready(sums)

  return step
