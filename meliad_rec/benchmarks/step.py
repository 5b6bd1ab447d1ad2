"""Compares training steps of the models of the Block-Recurrent paper's Table 1.

  meliad-rec bench step [--setting=small]

All models have the same sizes and L layers, except for the baseline. Rows of
the table:

- slide L: Transformer with a sliding window; a segment has several windows.
- slide L+1: the baseline, the same with one more layer. According to section
  4.2 of Hutchins et al. 2022, a recurrent layer costs about as much as an
  additional ordinary layer.
- xl L: as `slide L`, but a segment has one window (Transformer-XL). `xl L 2W`
  and `xl L 4W` have windows of twice and four times the length.
- rec GATE:CONFIGURATION: Block-Recurrent Transformer with one recurrent layer.
- feedback GATE:CONFIGURATION: Transformer with block feedback.

At the sizes of the paper, all rows are experiments, also its Memorizing
Transformer. On accelerators with enough memory, this compares them:

  meliad-rec bench experiments block_recurrent/table1_slide_13l \\
    block_recurrent/table1_rec_fixed_skip block_recurrent/table1_memorizing_64k
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
  """Sizes of the models.

  Attributes:
    config: configuration of every layer.
    layers: number of layers L.
    recurrent_at: index of the recurrent layer; a negative one counts from the
      end.
    slots: number of state vectors.
    rows: batch size; larger in `xl L`.
    segment: tokens per row and step; fewer in `xl L`.
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
  # gin/size/small.gin, with segments of 8 blocks.
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
  """Returns a cell of L + `more` layers with a sliding window."""
  return stack.layers(s.layers + more, lambda: WindowLayer(s.config))


def recurrent(s: StepSizes, gate: Callable, gate_config: str) -> Cell:
  """Returns a cell of L layers, one of them recurrent.

  Args:
    s: sizes.
    gate, gate_config: see BlockRecurrentLayer.
  """
  special = functools.partial(
    BlockRecurrentLayer, s.config, s.slots, gate, gate_config, remat='full'
  )
  layer = lambda: WindowLayer(s.config)
  return stack.layers(s.layers, layer, special, (s.recurrent_at,))


def feedback(s: StepSizes, gate: Callable, gate_config: str) -> Cell:
  """Returns a cell of L layers with block feedback; see BlockFeedback."""
  places = (s.recurrent_at,)
  return BlockFeedback(
    s.config, s.layers, places, s.slots, gate, gate_config, remat='auto'
  )


BASELINE = 'slide L+1'
# {model whose segments have one window: multiple of the window's length}.
XL = {'xl L': 1, 'xl L 2W': 2, 'xl L 4W': 4}
_GATES = {'fixed': gates.FixedGate, 'lstm': gates.LSTMGate}
CELLS = {
  'slide L': slide,
  BASELINE: functools.partial(slide, more=1),
  **dict.fromkeys(XL, slide),
  **{
    f'rec {name}:{gate_config}': functools.partial(
      recurrent, gate=gate, gate_config=gate_config
    )
    for name, gate in _GATES.items()
    for gate_config in ('single', 'skip', 'dual')
  },
  **{
    f'feedback {name}:{gate_config}': functools.partial(
      feedback, gate=_GATES[name], gate_config=gate_config
    )
    for name, gate_config in (('fixed', 'skip'), ('lstm', 'single'))
  },
}


def programs(
  setting: StepSizes, cells: dict[str, Callable] = CELLS
) -> dict[str, TrainProgram]:
  """Returns {name of the model: its training program}.

  Args:
    setting: sizes of the models.
    cells: {name: function that takes StepSizes and returns a cell}.
  """
  found = {}
  for name, cell in cells.items():
    window = XL.get(name, 1) * setting.config.window
    config = dataclasses.replace(setting.config, window=window)
    sizes = dataclasses.replace(setting, config=config)
    found[name] = program(sizes, cell(sizes), name in XL)
  return found


def measure(
  setting: StepSizes, rounds: int, cells: dict[str, Callable] = CELLS
) -> dict[str, training.StepCost]:
  """Returns {name of the model: cost of its training step}.

  Args:
    setting: sizes of the models.
    rounds: number of times that each step is timed.
    cells: see `programs`; BASELINE must be one of the names.
  """
  return training.measure(programs(setting, cells), BASELINE, rounds)


def program(
  setting: StepSizes, cell: Cell, one_window: bool = False
) -> TrainProgram:
  """Returns a training program, on one device.

  Args:
    setting: sizes of the model and its batch.
    cell: cell of the model.
    one_window: whether a segment has the length of one window instead of
      StepSizes.segment. If True, the batch size is larger, so that the number
      of tokens per step stays the same.
  """
  config = setting.config
  segment = config.window if one_window else setting.segment
  model = Model(setting.vocab, cell, config.d_model, config.dropout)
  return training.program(
    model, setting.rows * setting.segment // segment, segment
  )
