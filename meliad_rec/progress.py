"""How far a run's evaluations have come; saved with its state, as JSON."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Progress:
  """What of a run is neither arrays nor data position.

  Attributes:
    evaluated: step of the last evaluation.
    metric: the figure that `best` is of; None: no evaluation yet.
    best: its best value; None: none was finite.
    since_best: evaluations since then.
  """

  evaluated: int = 0
  metric: str | None = None
  best: float | None = None
  since_best: int = 0

  def after(
    self, step: int, metric: str, value: float, best_is: str
  ) -> 'Progress':
    """The progress after one more evaluation.

    Args:
      step: training steps done.
      metric: by which runs are judged; another than before starts anew.
      value: of the metric.
      best_is: 'lowest' or 'highest'.
    """
    known = self.best is not None and self.metric == metric
    lower = known and value < self.best
    higher = known and value > self.best
    better = not known or (lower if best_is == 'lowest' else higher)
    if better and math.isfinite(value):
      return Progress(step, metric, value)
    best = self.best if known else None
    return Progress(step, metric, best, self.since_best + 1)

  def is_stale(self, patience: int | None) -> bool:
    """Whether so many evaluations in a row gave no new best."""
    return patience is not None and self.since_best >= patience
