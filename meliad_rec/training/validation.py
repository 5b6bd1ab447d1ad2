"""Evaluation during a run: metrics of the validation split, and a sample."""

from collections.abc import Callable
import contextlib
import dataclasses

from absl import logging

from meliad_rec.data.dataset import baselines
from meliad_rec.data.documents import Documents
from meliad_rec.distributed.partition import rows_for
from meliad_rec.evaluation.evaluation import evaluate
from meliad_rec.evaluation.evaluation import metrics_given
from meliad_rec.generation.decoder import Decoder
from meliad_rec.metrics.metrics import BEST
from meliad_rec.models.checks import check_can_generate
from meliad_rec.models.checks import check_data_compatible
from meliad_rec.models.checks import least_segment
from meliad_rec.report.console import Countdown
from meliad_rec.report.journal import TRIVIAL
from meliad_rec.report.report import Report
from meliad_rec.training.experiment import Experiment

# A state that costs less than this share of the loss when it is cleared, after
# this many training steps, is reported.
_LITTLE = 0.001
_LEARNED = 2000
# With fewer mean steps in depth than this, nearly all tokens halt before their
# first step.
_NO_DEPTH = 0.01


class Validation:
  """An evaluator of an experiment on its validation split.

  Args:
    experiment: the experiment.

  Attributes:
    split: identity of the whole validation split.
    documents: the part of the split that evaluations read.
    sharded: the model that reads them. If it reads whole documents, and some
      are longer than SEGMENT, its segments have the longest one.
    baselines: {name of a trivial predictor: its error on the whole split}.

  Raises:
    ValueError: the documents do not provide best_metric or a sample, or the
      model cannot read the documents of both splits.
  """

  def __init__(self, experiment: Experiment):
    self._experiment = experiment
    self._vocabulary = experiment.data.vocabulary
    whole = experiment.data.documents('validation')
    self.split = whole.identity
    self.documents = experiment.eval_subset.of(whole, self._vocabulary)
    _check(experiment, self.documents)
    self.sharded = experiment.program
    segment = least_segment(self.sharded.model, self.documents)
    if segment > experiment.segment:
      self.sharded = dataclasses.replace(self.sharded, segment=segment)
    mesh, batch = self.sharded.mesh, experiment.batch
    self._rows = rows_for(mesh, len(self.documents), batch)
    segment = max(experiment.segment, segment)
    _check_model(experiment, self.documents, segment)
    self.baselines = baselines(experiment.data, 'validation')
    for name, error in self.baselines.items():
      logging.info('Trivial predictor %s: error %.2f %%.', name, 100 * error)
    if experiment.sample.length:
      program, segment = experiment.program, experiment.segment
      self._decoder = Decoder(program.model, None, segment, mesh=program.mesh)

  def evaluate(
    self, params, step: int, report: Report, stop: Callable[[], bool]
  ) -> dict[str, float] | None:
    """Evaluates parameters; reports the metrics and a sample.

    Args:
      params: parameters to evaluate.
      step: training steps so far.
      report: where metrics and sample are written.
      stop: called before each segment and after every few tokens of the sample.
        If it returns True, the evaluation ends, and nothing is reported.

    Returns:
      {metric: value}; None if `stop` ended the evaluation.
    """
    experiment = self._experiment
    countdown = Countdown(self.documents.tokens_read, 'tokens')
    with contextlib.closing(countdown):
      metrics = evaluate(
        self.sharded,
        params,
        self.documents,
        self._rows,
        stop,
        on_progress=countdown.show,
      )
    if metrics is None:
      return None
    text = None
    if experiment.sample.length:
      self._decoder.variables = {'params': params}
      text = experiment.sample.write(
        self._decoder, self.documents, self._vocabulary, stop
      )
      if text is None:
        return None
    report.write(step, metrics, 'validation')
    for name, error in self.baselines.items():
      report.write(step, {'error': error}, TRIVIAL + name)
    if text is not None:
      report.text(step, 'sample', text)
    _log_use_of_state(step, metrics, step == experiment.last_step)
    report.plot()
    if 'error' in metrics:
      report.plot('error')
    return metrics


def _log_use_of_state(step: int, metrics: dict[str, float], last: bool) -> None:
  """Logs what the state is worth; warns if it or the depth hardly helps.

  Args:
    step: training steps so far; early ones give no warning.
    metrics: {metric: value} of the evaluation.
    last: whether it is the last evaluation of the run.
  """
  if metrics.get('halting_depth', 1) < _NO_DEPTH:
    logging.warning(
      'After %d steps, tokens halt before their first step in depth. The layer '
      'thus gets no gradient, and will hardly change any more. Begin again '
      'with a lower LEARNING_RATE or HALT_BIAS, or with HALT_WARMUP if '
      'PONDER_COST is above 0.',
      step,
    )
  loss, cost = metrics['loss_nats_per_token'], metrics.get('cleared_cost')
  if cost is None:
    return
  if step >= _LEARNED and cost < _LITTLE * loss:
    logging.warning(
      'The recurrent state hardly helps after %d steps: clearing it at the '
      'start of a segment changes the loss by %+.2g nats/token (now %.4g). The '
      'section "When a recurrent state helps" of gin/README.md says what to '
      'change.',
      step,
      cost,
      loss,
    )
  elif last:
    logging.info(
      'Value of the recurrent state: without the state from earlier segments, '
      'the loss would change by %+.4f nats/token (now %.4f).',
      cost,
      loss,
    )


def _check(experiment: Experiment, documents: Documents) -> None:
  if documents.labels is not None and not documents.labels.any():
    raise ValueError(
      'The part of the validation split that is read has no scored label. '
      'Increase EVAL_DOCUMENTS or EVAL_TOKENS; None reads all.'
    )
  if not len(documents.tokens):
    raise ValueError(
      'The validation split has no text: its documents are empty. Give data '
      'with a validation split that has some.'
    )
  given = [name for name in metrics_given(documents) if name in BEST]
  if experiment.best_metric not in given:
    raise ValueError(
      f'best_metric is {experiment.best_metric!r}, but these validation data '
      f'provide only {", ".join(given)}. Set experiment.Experiment.best_metric '
      'to one of them.'
    )
  if documents.labels is not None and experiment.sample.length:
    raise ValueError(
      f'SAMPLE must be 0 for a model that predicts labels, got '
      f'{experiment.sample.length}. Set SAMPLE = 0.'
    )


def _check_model(
  experiment: Experiment, documents: Documents, segment: int
) -> None:
  model, first = experiment.program.model, experiment.shorter_first
  train = experiment.data.documents('train')
  check_data_compatible(model, train, experiment.segment, 'SEGMENT')
  check_data_compatible(model, documents, segment, 'SEGMENT')
  if first:
    check_data_compatible(model, train, first.segment, 'FIRST_SEGMENT')
  if train.have_sources:
    shortest = experiment.segment // 2 ** (experiment.buckets - 1)
    setting = 'SEGMENT / 2**(BUCKETS - 1)'
    check_data_compatible(model, train, shortest, setting)
  if experiment.sample.length:
    check_can_generate(model)
