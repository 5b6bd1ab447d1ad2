"""How far a run's evaluations have come; saved with its state, as JSON."""

import dataclasses
import math

from absl import logging


@dataclasses.dataclass(frozen=True)
class Progress:
  """What of a run is neither arrays nor data position.

  Attributes:
    evaluated: step of the last evaluation.
    metric: the figure that `best` is of; None: not known yet.
    validation: identity of the documents that it is of.
    best: its best value; None: none was finite.
    since_best: evaluations since then.
  """

  evaluated: int = 0
  metric: str | None = None
  validation: str | None = None
  best: float | None = None
  since_best: int = 0

  def judged_by(self, metric: str, validation: str) -> 'Progress':
    """The same; without a best, and told, where it was of something else."""
    if (self.metric, self.validation) == (metric, validation):
      return self
    if self.metric is not None:
      changed = 'best_metric' if self.metric != metric else 'validation data'
      logging.warning(
        'The %s of this run changed: the search for the best step starts anew.',
        changed,
      )
    return Progress(self.evaluated, metric, validation)

  def after(self, step: int, value: float, best_is: str) -> 'Progress':
    """The progress after one more evaluation.

    Args:
      step: training steps done.
      value: of the metric.
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
    """Whether so many evaluations in a row gave no new best."""
    return patience is not None and self.since_best >= patience
