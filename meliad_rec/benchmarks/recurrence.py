"""Compares training steps of the models of the Staircase and Feedback papers.

  meliad-rec bench recurrence

The baseline is Transformer-XL of the same sizes. Two columns of the table have
the FLOP of a step. `GFLOP` has 3 times those counted in the traced forward
pass. `closed` has those of closed formulas (`closed_flops`), which leave out
masked parts of blocks and recomputation.
"""

import dataclasses

from meliad_rec.archs import stack
from meliad_rec.archs.feedback import Feedback
from meliad_rec.archs.staircase import Staircase
from meliad_rec.archs.window import WindowLayer
from meliad_rec.benchmarks import training
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.models.cell import Cell
from meliad_rec.models.model import Model
from meliad_rec.training.program import TrainProgram


@dataclasses.dataclass(frozen=True)
class RecurrenceSizes:
  """Sizes that all models share.

  Attributes:
    config: configuration of every layer.
    layers: number of layers.
    passes: number of passes N of the staircases over each token.
    rows: batch size.
    segment: tokens per row and step.
    vocab: size of the vocabulary.
  """

  config: LayerConfig
  layers: int
  passes: int
  rows: int
  segment: int
  vocab: int


SETTINGS = {
  # Sizes at which the authors' code was measured on a CPU.
  'bench': RecurrenceSizes(
    LayerConfig(d_model=128, num_heads=4, head_dim=32, mlp_dim=512, window=64),
    layers=2,
    passes=4,
    rows=8,
    segment=256,
    vocab=256,
  ),
}
BASELINE = 'xl'


def cells(s: RecurrenceSizes) -> dict[str, Cell]:
  """Returns {name of the row in the table: cell of the model}."""
  config, sizes = s.config, {'config': s.config, 'count': s.layers}
  stairs = sizes | {
    'config': dataclasses.replace(config, include_self=True),
    'passes': s.passes,
  }
  return {
    BASELINE: stack.layers(s.layers, lambda: WindowLayer(config)),
    'staircase': Staircase(**stairs),
    'cached staircase': Staircase(**stairs, live=1),
    'feedback': Feedback(**sizes, share_keys=False),
    'feedback shared': Feedback(**sizes),
  }


def closed_flops(s: RecurrenceSizes) -> dict[str, int]:
  """Returns {name of the model: FLOP of a training step} by closed formulas.

  The FLOP are 3 times the FLOP of the forward pass, output logits included.
  """
  c, L, N = s.config, s.layers, s.passes
  heads = c.num_heads * c.head_dim
  attend = lambda keys: 4 * heads * keys
  key_value = 4 * c.d_model * heads
  layer = 2 * key_value + 4 * c.d_model * c.mlp_dim
  of_layers = {
    BASELINE: L * (layer + attend(c.window)),
    'staircase': L * (N * layer + attend(c.window * (N + 1) / 2)),
    'cached staircase': L * (layer + key_value + attend(c.window)),
    'feedback': L * (layer + attend(c.window)),
    'feedback shared': L * (layer + attend(c.window)) - (L - 1) * key_value,
  }
  tokens, logits = s.rows * s.segment, 2 * c.d_model * s.vocab
  return {n: int(3 * tokens * (f + logits)) for n, f in of_layers.items()}


def programs(setting: RecurrenceSizes) -> dict[str, TrainProgram]:
  """Returns {name of the model: its training program}."""
  return {
    name: training.program(
      Model(setting.vocab, cell, setting.config.d_model),
      setting.rows,
      setting.segment,
    )
    for name, cell in cells(setting).items()
  }


def measure(
  setting: RecurrenceSizes, rounds: int
) -> dict[str, training.StepCost]:
  """Returns {name of the model: cost of its training step}.

  Args:
    setting: sizes of the models.
    rounds: number of times that each step is timed.
  """
  rows = training.measure(programs(setting), BASELINE, rounds)
  closed = closed_flops(setting)
  return {
    name: dataclasses.replace(row, closed_flops=closed[name])
    for name, row in rows.items()
  }
