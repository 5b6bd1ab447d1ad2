"""What a run is: model, data, optimiser, and how long each does what."""

from collections.abc import Callable
import dataclasses
import functools

import jax

from meliad_rec.data.dataset import Dataset
from meliad_rec.data.lanes import ShorterFirst
from meliad_rec.distributed import partition
from meliad_rec.evaluation.evaluation import Part
from meliad_rec.generation.sample import Sample
from meliad_rec.metrics import losses
from meliad_rec.models.model import Model
from meliad_rec.training.optimizer import Optimizer
from meliad_rec.training.program import TrainProgram

# Figures by which a checkpoint can be best, and which value of them is.
BEST = {
  'bits_per_byte': 'lowest',
  'bits_per_token': 'lowest',
  'loss_nats_per_token': 'lowest',
  'word_perplexity': 'lowest',
  'accuracy': 'highest',
  'error': 'lowest',
}


@dataclasses.dataclass(frozen=True)
class Experiment:
  """Everything about a run but where it writes.

  Attributes:
    model: makes the model, given the size of the vocabulary.
    data: the splits train and validation, and their vocabulary.
    optimizer: of optimizer.chain.
    batch: documents read side by side, over all hosts.
    segment: tokens of each in a step; gradients reach so far back.
    steps: training steps in all.
    shorter_first: shorter segments for the first of them; None: for none.
    seed: of parameters, dropout and the order of documents.
    mesh: makes the mesh of devices.
    objective: (logits_BTV, targets_BT) -> nats_BT to minimise.
    ema_decay: of a moving average of parameters, which is then what is
      evaluated; None: none.
    halting_warmup: steps over which the loss of halting rises from nothing to
      its whole weight, PONDER_COST; 0: none.
    part: what of the validation split an evaluation reads.
    sample: text written at each evaluation.
    log_every, eval_every, save_every: in steps.
    keep: checkpoints kept besides the best.
    best_metric: validation figure by which a checkpoint is best; of BEST, and
      one that the data give: only text has bytes and words, only labels error.
    patience: evaluations without a new best after which the run ends; None:
      it goes on.
  """

  model: Callable[[int], Model]
  data: Dataset
  optimizer: Optimizer
  batch: int
  segment: int
  steps: int
  shorter_first: ShorterFirst | None = None
  seed: int = 0
  mesh: Callable[[], jax.sharding.Mesh] = partition.make_mesh
  objective: Callable = losses.objective
  ema_decay: float | None = None
  halting_warmup: int = 0
  part: Part = Part()
  sample: Sample = Sample()
  log_every: int = 50
  eval_every: int = 1000
  save_every: int = 1000
  keep: int = 3
  best_metric: str = 'bits_per_byte'
  patience: int | None = None

  def __post_init__(self):
    positive = ('batch', 'segment', 'steps', 'keep', 'patience')
    for name in (*positive, 'log_every', 'eval_every', 'save_every'):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise _wrong(name, value, '1 or more')
    for name, bits in ('seed', 32), ('halting_warmup', 31):
      if not 0 <= getattr(self, name) < 2**bits:
        needed = f'0 or more, and below 2**{bits}'
        raise _wrong(name, getattr(self, name), needed)
    if self.ema_decay is not None and not 0 < self.ema_decay < 1:
      raise _wrong('ema_decay', self.ema_decay, 'None, or between 0 and 1')
    if self.best_metric not in BEST:
      raise _wrong('best_metric', self.best_metric, f'one of {", ".join(BEST)}')
    first = self.shorter_first
    if first and (first.segment >= self.segment or first.steps >= self.steps):
      raise ValueError(
        f'Segments of {first.segment} tokens are to come first for '
        f'{first.steps} steps, and the run has {self.steps}, of {self.segment} '
        'tokens; set FIRST_SEGMENT and FIRST_STEPS to less than SEGMENT and '
        'STEPS.'
      )

  @property
  def best_is(self) -> str:
    """'lowest' or 'highest': which best_metric is best."""
    return BEST[self.best_metric]

  @functools.cached_property
  def program(self) -> TrainProgram:
    """The model and optimiser on the mesh."""
    return TrainProgram(
      model=self.model(self.data.vocabulary.size),
      mesh=self.mesh(),
      segment=self.segment,
      optimizer=self.optimizer,
      objective=self.objective,
      rows=self.batch,
      ema_decay=self.ema_decay,
      halting_warmup=self.halting_warmup,
    )

  @functools.cached_property
  def first_program(self) -> TrainProgram:
    """That of the steps with shorter segments; its states are the same."""
    return dataclasses.replace(self.program, segment=self.shorter_first.segment)

  def program_of(self, step: int) -> TrainProgram:
    """What computes a step, counted from 0."""
    first = self.shorter_first
    return self.first_program if first and step < first.steps else self.program


def _wrong(name: str, value, needed: str) -> ValueError:
  return ValueError(
    f'{name} is {value!r}; it must be {needed}. Set '
    f'experiment.Experiment.{name}.'
  )
