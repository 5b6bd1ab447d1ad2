"""Compares training steps of the models of the Block-Recurrent paper's Table 1.

  meliad-rec bench step [--setting=small]

All models have the same sizes, L layers among them. `slide` has a sliding
window, in segments of several windows; `xl` is the same with segments of one
window. According to section 4.2 of Hutchins et al. 2022, a recurrent layer
costs about as much as an additional ordinary layer, so the baseline is `slide`
with L + 1 layers.
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
class StepSizes:
  """Sizes that all models share.

  Attributes:
    config: configuration of every layer.
    layers: number of layers L.
    recurrent_at: index of the recurrent layer.
    slots: number of state vectors.
    rows: batch size; `xl` has a larger one, with shorter segments.
    segment: tokens per row and step.
    vocab: size of the vocabulary.
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
  # Sizes at which the authors' own code (meliad) was measured on a CPU.
  'meliad': StepSizes(SMALL, 4, 1, slots=128, rows=4, segment=512, vocab=256),
  # gin/size/small.gin, as launch/compare.sh trains it.
  'small': StepSizes(
    dataclasses.replace(SMALL, dropout=0.0),
    6,
    -3,
    slots=128,
    rows=4,
    segment=1024,
    vocab=259,
  ),
  # The paper's depth, with 8 blocks per segment.
  '12l': StepSizes(SMALL, 12, -3, slots=128, rows=2, segment=1024, vocab=256),
}


def slide(s: StepSizes, more: int = 0) -> Cell:
  """Returns L + more layers with a sliding window."""
  return stack.layers(s.layers + more, lambda: WindowLayer(s.config))


def recurrent(s: StepSizes, gate: Callable, gate_config: str) -> Cell:
  """Returns L layers, of which one is recurrent; see BlockRecurrentLayer."""
  special = functools.partial(
    BlockRecurrentLayer, s.config, s.slots, gate, gate_config, remat='full'
  )
  layer = lambda: WindowLayer(s.config)
  return stack.layers(s.layers, layer, special, (s.recurrent_at,))


def feedback(s: StepSizes) -> Cell:
  """Returns L layers with block feedback."""
  return BlockFeedback(
    s.config, s.layers, (s.recurrent_at,), s.slots, remat='sublayers'
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


def programs(
  setting: StepSizes, cells: dict[str, Callable] = CELLS
) -> dict[str, TrainProgram]:
  """Returns the training program of each model, by name."""
  return {
    name: program(setting, cell(setting), name.startswith('xl'))
    for name, cell in cells.items()
  }


def measure(
  setting: StepSizes, rounds: int, cells: dict[str, Callable] = CELLS
) -> dict[str, training.StepCost]:
  """Returns the cost of each model by name; `cells` must include BASELINE."""
  return training.measure(programs(setting, cells), BASELINE, rounds)


def program(
  setting: StepSizes, cell: Cell, one_window: bool = False
) -> TrainProgram:
  """Returns a training program, on one device.

  Args:
    setting: sizes of the model and its batch.
    cell: cell of the model.
    one_window: whether segments have the length of one window, as in `xl`. The
      batch is then larger, so that a step has as many tokens.
  """
  config = setting.config
  segment = config.window if one_window else setting.segment
  model = Model(setting.vocab, cell, config.d_model, config.dropout)
  return training.program(
    model, setting.rows * setting.segment // segment, segment
  )
