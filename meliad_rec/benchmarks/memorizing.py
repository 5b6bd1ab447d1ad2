"""Training steps of a small Memorizing Transformer, by size of its memory.

Its last layer recalls older keys. Transformer-XL of the same sizes is the
baseline. Memories are full from the first step, since what a search costs may
depend on what is found.
"""

import dataclasses
import functools

import jax

from meliad_rec.archs import stack
from meliad_rec.archs.memorizing import MemorizingLayer
from meliad_rec.archs.memorizing import Ring
from meliad_rec.archs.window import WindowLayer
from meliad_rec.benchmarks import recurrence
from meliad_rec.benchmarks import training
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.models.cell import Cell
from meliad_rec.models.model import Model
from meliad_rec.training.program import TrainProgram
from meliad_rec.training.train_step import TrainState


@dataclasses.dataclass(frozen=True)
class Setting:
  """Sizes that all rows share.

  Attributes:
    config: of every layer.
    layers: L.
    memories: older keys of each row, and the row names.
    neighbors: keys that a query attends to.
    recall_target: share of them that an approximate search shall find.
    rows: of a batch.
    segment: tokens of a row in a step.
    vocab: token ids.
  """

  config: LayerConfig
  layers: int
  memories: tuple[int, ...]
  neighbors: int
  recall_target: float
  rows: int
  segment: int
  vocab: int


SETTINGS = {
  'bench': Setting(
    recurrence.SETTINGS['bench'].config,
    layers=2,
    memories=(8192, 65536),
    neighbors=32,
    recall_target=0.95,
    rows=8,
    segment=256,
    vocab=256,
  ),
}
BASELINE = 'xl'


@dataclasses.dataclass(frozen=True)
class Row:
  """What one model's training step costs.

  Attributes:
    step: its time, memory and products.
    state_bytes: of all rows, carried from step to step.
  """

  step: training.Row
  state_bytes: int

  def columns(self, baseline: str) -> dict[str, str]:
    """Names and values for a table."""
    columns = self.step.columns(baseline)
    shown = 'step ms', 'spread', f'/ {baseline}', 'cpu ms', 'temp MiB'
    state = {'state MiB': f'{self.state_bytes / 2**20:.1f}'}
    return {name: columns[name] for name in shown} | state


class FullMemory(TrainProgram):
  """A program whose runs begin with memories of random keys and values."""

  def create(self, seed: int) -> TrainState:
    state = super().create(seed)
    is_ring = lambda node: isinstance(node, Ring)
    fill_all = lambda carry: jax.tree.map(
      lambda a: fill(a) if is_ring(a) else a, carry, is_leaf=is_ring
    )
    return state.replace(carry=jax.jit(fill_all)(state.carry))


def fill(ring: Ring) -> Ring:
  """The ring, all of whose places hold something that may be seen."""
  rng_k, rng_v = jax.random.split(jax.random.key(0))
  normal = lambda rng, a: jax.random.normal(rng, a.shape, a.dtype)
  return ring.replace(
    keys=normal(rng_k, ring.keys),
    values=normal(rng_v, ring.values),
    mask=~ring.mask,
  )


def cells(s: Setting) -> dict[str, Cell]:
  """The cell of each row."""
  layer = lambda: WindowLayer(s.config)
  found = {BASELINE: stack.layers(s.layers, layer)}
  searches = {
    f'{s.neighbors} nearest': (s.neighbors, None),
    f'{s.neighbors}, approximate': (s.neighbors, s.recall_target),
    'all': (None, None),
  }
  for memory in s.memories:
    for name, (neighbors, target) in searches.items():
      special = functools.partial(
        MemorizingLayer, s.config, memory, neighbors, s.segment, target
      )
      cell = stack.layers(s.layers, layer, special, (-1,))
      found[f'{memory}: {name}'] = cell
  return found


def measure(setting: Setting, rounds: int) -> dict[str, Row]:
  """A row for each model."""
  programs = {name: program(setting, c) for name, c in cells(setting).items()}
  steps = training.measure(programs, BASELINE, rounds)
  return {
    name: Row(steps[name], _state_bytes(p)) for name, p in programs.items()
  }


def program(setting: Setting, cell: Cell) -> FullMemory:
  """A run's program, on one device."""
  model = Model(setting.vocab, cell, setting.config.d_model)
  made = training.program(model, setting.rows, setting.segment)
  fields = dataclasses.fields(made)
  return FullMemory(**{f.name: getattr(made, f.name) for f in fields})


def _state_bytes(p: TrainProgram) -> int:
  leaves = jax.tree.leaves(p.shapes.carry)
  return sum(a.size * a.dtype.itemsize for a in leaves)
