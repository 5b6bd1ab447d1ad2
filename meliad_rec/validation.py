"""Evaluations within a run: figures of the validation split, and a sample."""

from collections.abc import Callable

from meliad_rec.evaluation import evaluate
from meliad_rec.experiment import Experiment
from meliad_rec.generation.decode import Decoder
from meliad_rec.report.report import Report


class Validation:
  """What an experiment evaluates on.

  Attributes:
    documents: the part of the validation split that is read.
  """

  def __init__(self, experiment: Experiment):
    self._experiment = experiment
    self._vocabulary = experiment.data.vocabulary
    self.documents = experiment.part.of(
      experiment.data.documents('validation'), self._vocabulary
    )
    self._decoder = Decoder(experiment.program.model, None, experiment.segment)

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
    if experiment.sample.length:
      self._decoder.variables = {'params': params}
      text = experiment.sample.write(
        self._decoder, self.documents, self._vocabulary
      )
      report.text(step, 'sample', text)
    report.plot()
    return figures
