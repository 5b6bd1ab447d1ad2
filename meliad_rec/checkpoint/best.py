"""Which step is best: by one metric, on one set of validation documents."""

import math


class Best:
  """How steps are judged.

  Args:
    metric: name of the figure; None: of whatever figure the steps have.
    best_is: 'lowest' or 'highest'.
  """

  def __init__(self, metric, best_is):
    if best_is not in ('lowest', 'highest'):
      raise ValueError(f'best_is is {best_is!r}; set lowest or highest.')
    self.metric = metric
    self._sign = 1 if best_is == 'lowest' else -1

  def score(self, metrics):
    """[metric, value of which lower is better], or None.

    Args:
      metrics: {name: float} of a step; None: it was not evaluated.
    """
    if self.metric is None or metrics is None:
      return None
    if self.metric not in metrics:
      raise ValueError(
        f'best_metric is {self.metric!r}, and the metrics are'
        f' {sorted(metrics)}; set best_metric to one of them.'
      )
    value = self._sign * float(metrics[self.metric])
    return [self.metric, value] if math.isfinite(value) else None


def comparable(scores):
  """{step: value}; None where it was judged on other data than the newest.

  Args:
    scores: {step: (value, validation data) or None}, oldest first.
  """
  data = [score[1] for score in scores.values() if score is not None]
  return {
    step: score[0] if score is not None and score[1] == data[-1] else None
    for step, score in scores.items()
  }
