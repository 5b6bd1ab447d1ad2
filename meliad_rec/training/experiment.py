"""The definition of a run: model, data, optimizer, and how long it trains."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools

import jax
import jax.numpy as jnp

from meliad_rec.data.dataset import Dataset
from meliad_rec.data.lanes import ShorterFirst
from meliad_rec.distributed import partition
from meliad_rec.evaluation.evaluation import EvalSubset
from meliad_rec.generation.sample import Sample
from meliad_rec.generation.translation import Translation
from meliad_rec.metrics import losses
from meliad_rec.metrics.metrics import BEST
from meliad_rec.models.model import Model
from meliad_rec.reinforcement.a2c import A2C
from meliad_rec.reinforcement.environment import Environment
from meliad_rec.reinforcement.environment import missing_members
from meliad_rec.report.loggers import MetricsLogger
from meliad_rec.training.agent_program import AgentProgram
from meliad_rec.training.optimizer import Optimizer
from meliad_rec.training.program import TrainProgram

# Settings in gin that set parameters of Experiment.
_MACROS = {
  'batch': 'BATCH',
  'segment': 'SEGMENT',
  'steps': 'STEPS',
  'source_segment': 'SOURCE_SEGMENT',
  'buckets': 'BUCKETS',
  'log_every': 'LOG_EVERY',
  'eval_every': 'EVAL_EVERY',
  'save_every': 'SAVE_EVERY',
  'halting_warmup': 'HALT_WARMUP',
  'published': 'PUBLISHED',
  'published_data': 'PUBLISHED_DATA',
}
# Begins the identity of an environment.
ENVIRONMENT = 'environment '


@dataclasses.dataclass(frozen=True)
class Experiment:
  """Everything about a run except its folder.

  Attributes:
    model: makes the model, given the size of the vocabulary. Agents have its
      cell and width.
    data: the splits 'train' and 'validation', and their vocabulary; or the
      environment of agents.
    optimizer: from optimizer.chain.
    batch: number of documents read in parallel, over all hosts; or environments
      of each agent.
    segment: tokens of each document per step; gradients reach this far back. A
      token of an agent is one observation and the action after it.
    steps: number of training steps.
    stop_at: step at which training stops, if it is before `steps`; the run can
      be resumed later. None: it does not stop before.
    source_segment: maximum tokens of a source. None: as many as in a segment;
      only for a model with an encoder.
    buckets: number of lengths to which sources and targets are padded; see
      PairBatches. A model without an encoder has 1.
    shorter_first: initial steps with shorter segments; None: no such steps.
    seed: seed for parameters, dropout and the order of documents.
    mesh: makes the mesh of devices.
    objective: (logits_BTV, targets_BT) -> nats_BT to minimize; or an A2C, which
      says how agents learn.
    ema_decay: decay of a moving average of the parameters. Evaluations use this
      average in place of the parameters. None: no average.
    halting_warmup: steps over which the weight of the ponder loss rises to
      PONDER_COST; 0 disables the warm-up.
    eval_subset: part of the validation split that evaluations read; its number
      of documents is also the number of episodes that agents play.
    sample: settings of the text that is generated at each evaluation.
    translation: settings with which a model with an encoder writes targets
      after training.
    log_every, eval_every, save_every: training steps between two reports, two
      evaluations and two checkpoints.
    keep: number of last checkpoints kept, in addition to the best one.
    best_metric: validation metric that selects the best checkpoint, a key of
      BEST. Metrics per byte and per word need data that are text, 'error' needs
      data with labels, and 'mean_return' and 'success' need agents.
    patience: the run ends after this number of evaluations in a row without a
      new best value of best_metric; None: no limit.
    metrics_logger: object that also receives all metrics, such as a
      loggers.WandB; None: they are written only to the folder of the run.
    published: {name: value that a paper reports; None if it gives none}. A name
      is a split ('test_128', for best_metric), SPLIT:METRIC
      ('test_400:sequence_accuracy'), 'parameters', or words that are not a
      split ('arXiv tokens'). 'test deviation' and 'test median' are those over
      the seeds of 'test'. `meliad-rec reproduce` shows the values beside those
      measured.
    published_data: the name in `published`, such as 'arXiv tokens', to which
      the split 'test' of this run corresponds. None: there is no such name.

  Raises:
    ValueError: an attribute is out of range, or the segment or steps of
      shorter_first are not below the run's.
  """

  model: Callable[[int], Model]
  data: Dataset | Environment
  optimizer: Optimizer
  batch: int
  segment: int
  steps: int
  stop_at: int | None = None
  source_segment: int | None = None
  buckets: int = 1
  shorter_first: ShorterFirst | None = None
  seed: int = 0
  mesh: Callable[[], jax.sharding.Mesh] = partition.make_mesh
  objective: Callable | A2C = losses.objective
  ema_decay: float | None = None
  halting_warmup: int = 0
  eval_subset: EvalSubset = EvalSubset()
  sample: Sample = Sample()
  translation: Translation = Translation()
  log_every: int = 50
  eval_every: int = 1000
  save_every: int = 1000
  keep: int = 3
  best_metric: str = 'bits_per_byte'
  patience: int | None = None
  metrics_logger: MetricsLogger | None = None
  published: Mapping[str, float | None] = dataclasses.field(
    default_factory=dict
  )
  published_data: str | None = None

  def __post_init__(self):
    positive = ('batch', 'segment', 'steps', 'keep', 'patience')
    positive += ('source_segment', 'buckets', 'stop_at')
    for name in (*positive, 'log_every', 'eval_every', 'save_every'):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise _wrong(name, value, 'at least 1')
    if self.steps >= 2**31:  # Devices count them as int32.
      raise _wrong('steps', self.steps, 'below 2**31')
    if self.batch * self.segment >= 2**31:
      raise ValueError(
        'A step must have fewer than 2**31 tokens, got '
        f'{self.batch} rows of {self.segment}. Lower BATCH or SEGMENT.'
      )
    for name, bits in ('seed', 32), ('halting_warmup', 31):
      if not 0 <= getattr(self, name) < 2**bits:
        needed = f'at least 0 and below 2**{bits}'
        raise _wrong(name, getattr(self, name), needed)
    if self.keep < self.translation.average:
      needed = f'at least AVERAGE, {self.translation.average}'
      raise _wrong('keep', self.keep, needed)
    if self.ema_decay is not None and not 0 < self.ema_decay < 1:
      raise _wrong('ema_decay', self.ema_decay, 'None or between 0 and 1')
    if self.best_metric not in BEST:
      raise _wrong('best_metric', self.best_metric, f'one of {", ".join(BEST)}')
    logger = self.metrics_logger
    is_logger = isinstance(logger, MetricsLogger | None)
    if not is_logger or isinstance(logger, type):
      needed = 'None or an object with start, log and close, as @NAME() makes'
      raise _wrong('metrics_logger', logger, needed)
    values = self.published.values()
    if not all(isinstance(value, int | float | None) for value in values):
      raise _wrong('published', self.published, '{name: number or None}')
    names = self.published
    if names and self.published_data not in (None, *names):
      needed = f'None or a name of PUBLISHED: {", ".join(names)}'
      raise _wrong('published_data', self.published_data, needed)
    is_agent = isinstance(self.objective, A2C)
    if is_agent and self.env is None and hasattr(self.data, 'reset'):
      lacks = ', '.join(missing_members(self.data))
      needed = f'an environment for agents (it lacks {lacks})'
      raise _wrong('data', self.data, needed)
    if self.env is not None and ' at 0x' in repr(self.env):
      needed = 'an environment whose repr shows its settings and no address in '
      needed += 'memory, such as a frozen dataclass'
      raise _wrong('data', self.data, needed)
    if is_agent is (self.env is None):
      needed = 'a function of logits and targets'
      if self.env is not None:
        needed = 'an A2C for agents in environments, such as @a2c.A2C()'
      raise _wrong('objective', self.objective, needed)
    if self.env is None:  # Reads and checks the settings of the objective.
      logits_BTV, targets_BT = jnp.zeros((1, 1, 8)), jnp.ones((1, 1), int)
      jax.eval_shape(self.objective, logits_BTV, targets_BT)
    first = self.shorter_first
    if first and (first.segment >= self.segment or first.steps >= self.steps):
      raise ValueError(
        'FIRST_SEGMENT and FIRST_STEPS must be below SEGMENT and STEPS, got '
        f'{first.segment} of {self.segment} tokens and {first.steps} of '
        f'{self.steps} steps. Lower them.'
      )

    for name in 'segment', 'source_segment':
      size = getattr(self, name) or self.segment
      if size % 2 ** (self.buckets - 1):
        raise _wrong(name, size, f'a multiple of {2 ** (self.buckets - 1)}')

  @property
  def last_step(self) -> int:
    """The step at which training ends."""
    return min(self.steps, self.stop_at or self.steps)

  @property
  def best_is(self) -> str:
    """'lowest' or 'highest': which value of best_metric is best."""
    return BEST[self.best_metric]

  @property
  def env(self) -> Environment | None:
    """The environment of agents; None if the data are documents."""
    return self.data if isinstance(self.data, Environment) else None

  @property
  def source_identity(self) -> str:
    """Identity of the vocabulary, or of the environment of agents."""
    if self.env is not None:
      return f'{ENVIRONMENT}{self.env!r}'
    return self.data.vocabulary.identity

  @property
  def parameters(self) -> int:
    """The number of parameters."""
    return sum(a.size for a in jax.tree.leaves(self.program.shapes.params))

  @functools.cached_property
  def program(self) -> TrainProgram:
    """The training step with segments of `segment` tokens, on the mesh."""
    if self.env is not None:
      return AgentProgram(
        model=self.model(self.env.actions),
        mesh=self.mesh(),
        segment=self.segment,
        optimizer=self.optimizer,
        objective=self.objective,
        rows=self.batch,
        ema_decay=self.ema_decay,
        env=self.env,
      )
    model = self.model(self.data.vocabulary.size)
    sources = self.source_segment or self.segment
    return TrainProgram(
      model=model,
      mesh=self.mesh(),
      segment=self.segment,
      optimizer=self.optimizer,
      objective=self.objective,
      rows=self.batch,
      ema_decay=self.ema_decay,
      halting_warmup=self.halting_warmup,
      source_segment=None if model.encoder is None else sources,
    )

  @functools.cached_property
  def programs(self) -> dict[int, TrainProgram]:
    """The training steps, {tokens of a row: TrainProgram}.

    Besides `program`, there is one for shorter_first, and one for each shorter
    bucket, which has more rows. All have the same train state, so training
    passes it from one to another.
    """
    replace = functools.partial(dataclasses.replace, self.program)
    segments = {self.segment: self.program}
    if self.shorter_first:
      first = self.shorter_first.segment
      segments[first] = replace(segment=first)
    for i in range(1, self.buckets):
      source, times = self.program.source_segment, 2**i
      segments[self.segment // times] = replace(
        segment=self.segment // times,
        source_segment=source and source // times,
        rows=self.batch * times,
      )
    return segments


def _wrong(name: str, value, needed: str) -> ValueError:
  setting = _MACROS.get(name, f'experiment.Experiment.{name}')
  return ValueError(f'{name} must be {needed}, got {value!r}. Set {setting}.')
