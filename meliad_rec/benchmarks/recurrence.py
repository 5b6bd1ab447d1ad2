"""Training steps of the models of the Staircase and Feedback papers.

Transformer-XL of the same sizes is the baseline. Beside the products that are
counted stand those of the closed formulas of `closed_flops`, without what a
block of queries computes beside its band, or what is computed twice.
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


@dataclasses.dataclass(frozen=True)
class Setting:
  """Sizes that all rows share.

  Attributes:
    config: of every layer.
    layers: L.
    passes: N of the staircases.
    rows: of a batch.
    segment: tokens of a row in a step.
    vocab: token ids.
  """

  config: LayerConfig
  layers: int
  passes: int
  rows: int
  segment: int
  vocab: int


SETTINGS = {
  # The setting at which the authors' code was measured on a CPU.
  'bench': Setting(
    LayerConfig(d_model=128, num_heads=4, head_dim=32, mlp_dim=512, window=64),
    layers=2,
    passes=4,
    rows=8,
    segment=256,
    vocab=256,
  ),
}
BASELINE = 'xl'


def cells(s: Setting) -> dict[str, Cell]:
  """The cell of each row."""
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


def closed_flops(s: Setting) -> dict[str, int]:
  """Of each row's step: 3 times its forward pass, logits and all."""
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


def measure(setting: Setting, rounds: int) -> dict[str, training.Row]:
  """A row for each model."""
  programs = {
    name: training.program(
      Model(setting.vocab, cell, setting.config.d_model),
      setting.rows,
      setting.segment,
    )
    for name, cell in cells(setting).items()
  }
  rows = training.measure(programs, BASELINE, rounds)
  closed = closed_flops(setting)
  return {
    name: dataclasses.replace(row, closed_flops=closed[name])
    for name, row in rows.items()
  }
