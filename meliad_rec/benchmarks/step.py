"""Step times of the models of the Block-Recurrent paper's Table 1.

All rows are of one setting. Hutchins et al. 2022, section 4.2: one recurrent
layer costs about as much as one more ordinary layer, so Slide with L + 1 layers
is the baseline.
"""

from collections.abc import Callable
import dataclasses
import functools

from meliad_rec.archs import stack
from meliad_rec.archs.block_feedback import BlockFeedback
from meliad_rec.archs.block_recurrent import BlockRecurrentLayer
from meliad_rec.archs.window import WindowLayer
from meliad_rec.benchmarks import training
from meliad_rec.layers import gates
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.models.cell import Cell
from meliad_rec.models.model import Model
from meliad_rec.training.program import TrainProgram


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
  d_model=256, num_heads=4, head_dim=64, mlp_dim=1024, window=128, dropout=0.05
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


def measure(
  setting: Setting, rounds: int, cells: dict[str, Callable] = CELLS
) -> dict[str, training.Row]:
  """A row for each model; the baseline must be among them."""
  programs = {
    name: program(setting, cell(setting), name.startswith('xl'))
    for name, cell in cells.items()
  }
  return training.measure(programs, BASELINE, rounds)


def program(
  setting: Setting, cell: Cell, one_window: bool = False
) -> TrainProgram:
  """A run's program; with segments of one window, and more rows, for XL."""
  config = setting.config
  segment = config.window if one_window else setting.segment
  model = Model(setting.vocab, cell, config.d_model, config.dropout)
  return training.program(
    model, setting.rows * setting.segment // segment, segment
  )
