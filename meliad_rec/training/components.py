"""Components of a run that depend on what it learns from: text or environments.

The trainer knows neither.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
from typing import Any
from typing import Protocol

from meliad_rec.data.lanes import Lanes
from meliad_rec.data.lanes import Position
from meliad_rec.data.pair_batches import PairBatches
from meliad_rec.distributed.partition import local_rows
from meliad_rec.report.console import counted
from meliad_rec.report.report import Report
from meliad_rec.training import agents
from meliad_rec.training.experiment import Experiment
from meliad_rec.training.meter import Meter
from meliad_rec.training.meter import StepMeter
from meliad_rec.training.validation import Validation


class Stream(Protocol):
  """An iterator over (batch, position of the next batch).

  Attributes:
    position: position of the next batch, as JSON values. `tokens` counts the
      tokens so far.
    local_rows: indices of the rows that this host reads.
  """

  local_rows: Any

  @property
  def segments(self) -> set[int]:
    """All numbers of tokens of a row that batches may have."""

  @property
  def position(self) -> Position: ...

  def __iter__(self) -> 'Stream': ...

  def __next__(self) -> tuple[Any, Position]: ...

  def seek(self, position: Position) -> None:
    """Continues at a position."""


class Validator(Protocol):
  """An object that evaluates parameters during a run."""

  def evaluate(
    self, params: Any, step: int, report: Report, stop: Callable[[], bool]
  ) -> dict[str, float] | None:
    """Returns {metric: value} after reporting it; see Validation.evaluate."""


@dataclasses.dataclass(frozen=True)
class Components:
  """The components of a run that depend on what it learns from.

  Attributes:
    stream: the batches of training.
    validation: evaluates parameters.
    meter: counts the metrics of training steps.
    identities: {name: text} of what the run reads, the same on all hosts.
      'validation' and 'validation split' are what evaluations read.
    match: names of the identities that a checkpoint must share, so that the run
      can resume from it.
    documents: what the run reads, in words.
  """

  stream: Stream
  validation: Validator
  meter: StepMeter
  identities: Mapping[str, str]
  match: tuple[str, ...]
  documents: str


def build_components(experiment: Experiment) -> Components:
  """Returns the components of a run; errors as in trainer.Run."""
  return _text(experiment) if experiment.env is None else _agents(experiment)


def _text(experiment: Experiment) -> Components:
  documents = experiment.data.documents('train')
  validation = Validation(experiment)
  described = counted(len(documents), 'document')
  if source := getattr(experiment.data, 'description', ''):
    described += f' ({source})'
  _check_options(experiment, documents.have_sources)
  read: Callable[..., Stream] = Lanes
  options: dict[str, Any] = {'shorter_first': experiment.shorter_first}
  if documents.have_sources:
    read = PairBatches
    options = {
      'source_segment': experiment.program.source_segment,
      'buckets': experiment.buckets,
    }
  return Components(
    stream=read(
      documents,
      experiment.batch,
      experiment.segment,
      seed=experiment.seed,
      local_rows=local_rows(experiment.program.mesh, experiment.batch),
      **options,
    ),
    validation=validation,
    meter=Meter(experiment.programs, documents),
    identities={
      'tokenizer': experiment.data.vocabulary.identity,
      'data': documents.identity,
      'validation': validation.documents.identity,
      'validation split': validation.split,
    },
    match=('tokenizer', 'data', 'documents'),
    documents=described,
  )


def _check_options(experiment: Experiment, have_sources: bool) -> None:
  """Raises ValueError if the experiment sets what its data do not use."""
  if have_sources and experiment.shorter_first:
    raise ValueError(
      'FIRST_SEGMENT and FIRST_STEPS are for documents, but these data are '
      'sources and targets, which are read whole. Remove them.'
    )
  if not have_sources and (experiment.source_segment or experiment.buckets > 1):
    raise ValueError(
      f'source_segment is {experiment.source_segment} and buckets is '
      f'{experiment.buckets}, but these data have no sources. Remove both.'
    )


def _agents(experiment: Experiment) -> Components:
  program, validation = experiment.program, agents.AgentValidation(experiment)
  frames = program.objective.agents * experiment.batch * experiment.segment
  return Components(
    stream=agents.Frames(frames, experiment.segment),
    validation=validation,
    meter=agents.AgentMeter(experiment.programs),
    identities={
      'tokenizer': experiment.source_identity,
      'environment': experiment.source_identity,
      'validation': validation.identity,
      'validation split': experiment.source_identity,
    },
    match=('environment',),
    documents=agents.description(experiment),
  )
