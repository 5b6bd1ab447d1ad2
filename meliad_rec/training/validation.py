"""Evaluations within a run: figures of the validation split, and a sample."""

from collections.abc import Callable

from absl import logging

from meliad_rec.data.dataset import baselines
from meliad_rec.data.documents import Documents
from meliad_rec.evaluation.evaluation import evaluate
from meliad_rec.evaluation.evaluation import figures_given
from meliad_rec.generation.decoder import Decoder
from meliad_rec.models.checks import check_can_generate
from meliad_rec.models.checks import check_data_compatible
from meliad_rec.report.journal import TRIVIAL
from meliad_rec.report.report import Report
from meliad_rec.training.experiment import BEST
from meliad_rec.training.experiment import Experiment


class Validation:
  """What an experiment evaluates on.

  Attributes:
    split: identity of the validation split.
    documents: the part of it that is read.
    baselines: what trivial answers get wrong of the whole split, by name.

  Raises:
    ValueError: these documents give no best_metric, or no sample; or the model
      cannot read them, or those of the training split.
  """

  def __init__(self, experiment: Experiment):
    self._experiment = experiment
    self._vocabulary = experiment.data.vocabulary
    whole = experiment.data.documents('validation')
    self.split = whole.identity
    self.documents = experiment.part.of(whole, self._vocabulary)
    _check(experiment, self.documents)
    _check_model(experiment, self.documents)
    self.baselines = baselines(experiment.data, 'validation')
    for name, error in self.baselines.items():
      logging.info('Trivial answer %s: wrong in %.2f %%.', name, 100 * error)
    if experiment.sample.length:
      program, segment = experiment.program, experiment.segment
      self._decoder = Decoder(program.model, None, segment, mesh=program.mesh)

  def evaluate(
    self, params, step: int, report: Report, stop: Callable[[], bool]
  ) -> dict[str, float] | None:
    """Reports figures and a sample; the figures, or None if it was given up.

    Args:
      params: what to evaluate.
      step: training steps done.
      report: where figures and sample go.
      stop: asked before each segment; the pass is given up where it says so.
    """
    experiment = self._experiment
    figures = evaluate(
      experiment.program, params, self.documents, experiment.batch, stop
    )
    if figures is None:
      return None
    report.write(step, figures, 'validation')
    for name, error in self.baselines.items():
      report.write(step, {'error': error}, TRIVIAL + name)
    if experiment.sample.length:
      self._decoder.variables = {'params': params}
      text = experiment.sample.write(
        self._decoder, self.documents, self._vocabulary
      )
      report.text(step, 'sample', text)
    report.plot()
    if 'error' in figures:
      report.plot('error')
    return figures


def _check(experiment: Experiment, documents: Documents) -> None:
  if documents.labels is not None and not documents.labels.any():
    raise ValueError(
      'No label of the validation documents counts; set EVAL_DOCUMENTS and '
      'EVAL_TOKENS to a part that holds some.'
    )
  given = [name for name in figures_given(documents) if name in BEST]
  if experiment.best_metric not in given:
    raise ValueError(
      f'best_metric is {experiment.best_metric!r}, and these validation data '
      f'give {", ".join(given)}; set experiment.Experiment.best_metric to one '
      'of those.'
    )
  if documents.labels is not None and experiment.sample.length:
    raise ValueError(
      f'SAMPLE is {experiment.sample.length}, and a model of labels writes no '
      'text; set SAMPLE = 0.'
    )


def _check_model(experiment: Experiment, documents: Documents) -> None:
  model, first = experiment.program.model, experiment.shorter_first
  train = experiment.data.documents('train')
  for each in train, documents:
    check_data_compatible(model, each, experiment.segment, 'SEGMENT')
  if first:
    check_data_compatible(model, train, first.segment, 'FIRST_SEGMENT')
  if experiment.sample.length:
    check_can_generate(model)
