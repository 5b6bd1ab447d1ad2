"""Compares training steps of Memorizing Transformers with several memories.

  meliad-rec bench memorizing

The models differ in the size of the memory and in the search. The last layer
attends to keys in the memory: to all of them, to those nearest to a query, or
to those that an approximate search finds. The baseline is Transformer-XL of the
same sizes. Memories are full from the first step, because the cost of a search
may depend on their content.
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
class MemorizingSizes:
  """Sizes of the models, which differ only in their memories.

  Attributes:
    config: configuration of every layer.
    layers: number of layers.
    memories: sizes of the memory to compare, in keys per row of a batch.
    neighbors: number of nearest keys that a query attends to, if it does not
      attend to all.
    recall_target: share of the nearest keys that an approximate search should
      find.
    rows: batch size.
    segment: tokens per row and step.
    vocab: size of the vocabulary.
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
  'bench': MemorizingSizes(
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
class MemorizingCost:
  """Cost of one model's training step.

  Attributes:
    step: time, memory and FLOP of the step.
    state_bytes: bytes of the states of all rows that are carried from one step
      to the next.
  """

  step: training.StepCost
  state_bytes: int

  def columns(self, baseline: str) -> dict[str, str]:
    """Returns {column: text} for a row of the table.

    Args:
      baseline: name of the baseline's row, for the headings of ratios.
    """
    columns = self.step.columns(baseline)
    shown = 'step ms', 'spread', f'/ {baseline}', 'cpu ms', 'temp MiB'
    state = {'state MiB': f'{self.state_bytes / 2**20:.1f}'}
    return {name: columns[name] for name in shown} | state


class FullMemory(TrainProgram):
  """Training program whose memories start full of random keys and values."""

  def create(self, seed: int) -> TrainState:
    state = super().create(seed)
    is_ring = lambda node: isinstance(node, Ring)
    fill_all = lambda carry: jax.tree.map(
      lambda a: fill(a) if is_ring(a) else a, carry, is_leaf=is_ring
    )
    return state.replace(carry=jax.jit(fill_all)(state.carry))


def fill(ring: Ring) -> Ring:
  """Returns a ring full of random keys and values, all of them visible.

  Args:
    ring: an empty ring of the same shapes.
  """
  rng_k, rng_v = jax.random.split(jax.random.key(0))
  normal = lambda rng, a: jax.random.normal(rng, a.shape, a.dtype)
  return ring.replace(
    keys=normal(rng_k, ring.keys),
    values=normal(rng_v, ring.values),
    mask=~ring.mask,
  )


def cells(s: MemorizingSizes) -> dict[str, Cell]:
  """Returns {name of the row in the table: cell of the model}."""
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


def measure(setting: MemorizingSizes, rounds: int) -> dict[str, MemorizingCost]:
  """Returns {name of the row in the table: cost of the model's training step}.

  Args:
    setting: sizes of the models.
    rounds: number of times that each step is timed.
  """
  programs = {name: program(setting, c) for name, c in cells(setting).items()}
  steps = training.measure(programs, BASELINE, rounds)
  return {
    name: MemorizingCost(steps[name], _state_bytes(p))
    for name, p in programs.items()
  }


def program(setting: MemorizingSizes, cell: Cell) -> FullMemory:
  """Returns the training program of a model with this cell, on one device."""
  model = Model(setting.vocab, cell, setting.config.d_model)
  made = training.program(model, setting.rows, setting.segment)
  fields = dataclasses.fields(made)
  return FullMemory(**{f.name: getattr(made, f.name) for f in fields})


def _state_bytes(p: TrainProgram) -> int:
  leaves = jax.tree.leaves(p.shapes.carry)
  return sum(a.size * a.dtype.itemsize for a in leaves)
