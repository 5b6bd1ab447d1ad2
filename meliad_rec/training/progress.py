"""Progress of a run's evaluations, saved as JSON in each checkpoint."""

import dataclasses
import math

from absl import logging


@dataclasses.dataclass(frozen=True)
class Progress:
  """Results of the evaluations of a run so far.

  Attributes:
    evaluated: step of the last evaluation; 0 before the first.
    metric: name of the metric that selects the best step; None: not known yet.
    validation: identity of the documents that evaluations read; None: not known
      yet.
    best: best value of the metric so far; None: there is no finite value yet.
    since_best: number of evaluations since the one that gave `best`, or all
      evaluations so far if `best` is None.
  """

  evaluated: int = 0
  metric: str | None = None
  validation: str | None = None
  best: float | None = None
  since_best: int = 0

  def judged_by(
    self, metric: str, validation: str, same_split: bool = False
  ) -> 'Progress':
    """Returns this progress, or one that begins a new search for the best step.

    If the metric or the documents have changed, the search begins again: `best`
    is None and `since_best` is 0. A warning says so, unless this is the first
    search of the run.

    Args:
      metric: name of the metric that selects the best step.
      validation: identity of the documents that evaluations read.
      same_split: whether the whole validation split is the same as before, so
        that the warning can say that another part of it is read.
    """
    if (self.metric, self.validation) == (metric, validation):
      return self
    if self.metric is not None:
      changed = 'validation data'
      if self.metric != metric:
        changed = 'best_metric'
      elif same_split:
        changed = 'EVAL_DOCUMENTS or EVAL_TOKENS'
      logging.warning(
        'The %s of this run changed: the search for the best step restarts.',
        changed,
      )
    return Progress(self.evaluated, metric, validation)

  def after(self, step: int, value: float, best_is: str) -> 'Progress':
    """Returns the progress after one more evaluation.

    Args:
      step: training steps so far.
      value: value of the metric; never a new best if it is not finite.
      best_is: 'lowest' or 'highest'.
    """
    known = self.best is not None
    lower = known and value < self.best
    higher = known and value > self.best
    better = not known or (lower if best_is == 'lowest' else higher)
    if better and math.isfinite(value):
      return dataclasses.replace(self, evaluated=step, best=value, since_best=0)
    since = self.since_best + 1
    return dataclasses.replace(self, evaluated=step, since_best=since)

  def is_stale(self, patience: int | None) -> bool:
    """Returns whether the last `patience` evaluations gave no new best.

    If `patience` is None, returns False.
    """
    return patience is not None and self.since_best >= patience
