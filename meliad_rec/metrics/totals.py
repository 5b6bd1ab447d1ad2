"""Totals over steps on the host, and the metrics computed from them.

Nothing here is traced by JAX. `Totals` reads the Sums of each step from the
devices and adds them up without rounding errors. `quality`, `label_quality` and
`speed` compute the reported numbers from a Totals; their units are in
metrics.py.
"""

from collections.abc import Sequence
import dataclasses
import math

import jax
import numpy as np

from meliad_rec.metrics.metrics import MaxMetric
from meliad_rec.metrics.metrics import Metric
from meliad_rec.metrics.metrics import split_name
from meliad_rec.metrics.metrics import Sums


@dataclasses.dataclass
class Totals:
  """The Sums of any number of steps, added up without rounding errors."""

  correct: int = 0
  tokens: int = 0
  scored: int = 0
  padding: int = 0
  steps: int = 0
  _nats: list[float] = dataclasses.field(default_factory=list)
  _norms: list[float] = dataclasses.field(default_factory=list)
  _sown: dict[str, list[Metric]] = dataclasses.field(default_factory=dict)

  def add(self, sums: Sums) -> None:
    """Waits for the Sums of a step, reads them and adds them to the totals."""
    sums = jax.device_get(sums)
    self.correct += int(sums.correct)
    self.tokens += int(sums.tokens)
    self.scored += int(sums.scored)
    self.padding += int(sums.padding)
    self.steps += int(sums.steps)
    self._nats.append(float(sums.nats))
    self._norms.append(float(sums.gradient_norm))
    for name, metric in sums.sown.items():
      self._sown.setdefault(name, []).append(metric)

  @property
  def nats(self) -> float:
    """The loss in nats, summed over scored tokens."""
    return math.fsum(self._nats)

  @property
  def gradient_norm(self) -> float:
    """The mean gradient norm over steps."""
    return math.fsum(self._norms) / self.steps

  @property
  def sown(self) -> dict[str, float]:
    """Metrics that modules sowed, {name: value}, without means of count 0.

    Names that end in a number are sorted by that number, after the same name
    without one.
    """

    def order(name):
      base, number = split_name(name)
      return base, -1 if number is None else number

    names = sorted(self._sown, key=order)
    values = {name: over_steps(self._sown[name]) for name in names}
    return {name: v for name, v in values.items() if v is not None}


def over_steps(metrics: Sequence[Metric]) -> float | None:
  """Combines the metrics sown under one name, one per step, into one number.

  Returns:
    The maximum of MaxMetrics. For MeanMetrics, the sum of totals divided by the
    sum of counts, or None if the latter is 0.
  """
  if isinstance(metrics[0], MaxMetric):
    # Unlike Python's max, NumPy's propagates NaN.
    return float(np.max([metric.value for metric in metrics]))
  count = math.fsum(float(metric.count) for metric in metrics)
  total = math.fsum(float(metric.total) for metric in metrics)
  return total / count if count else None


def quality(
  totals: Totals, bytes_: float | None = None, words: int | None = None
) -> dict[str, float]:
  """Returns {metric: value}: how well the scored tokens were predicted.

  Args:
    totals: counts with at least one scored token.
    bytes_: number of bytes of text of all tokens in `totals`; in training, an
      estimate from the data's mean bytes per token. None or 0 leaves out
      bits_per_byte.
    words: number of words of all tokens in `totals`, split at whitespace, as in
      the published counts of PG-19. None or 0 leaves out word_perplexity.

  Raises:
    ValueError: no token was scored.
  """
  if not totals.scored:
    raise ValueError(
      f'No scored token was counted in {totals.steps} steps, but metrics need '
      'at least one. Choose a split that has text or scored labels.'
    )
  nats, bits = totals.nats, totals.nats / math.log(2)
  metrics = {
    'loss_nats_per_token': nats / totals.scored,
    'bits_per_token': bits / totals.scored,
    'perplexity': _exp(nats / totals.scored),
    'accuracy': totals.correct / totals.scored,
    **counts(totals),
  }
  if bytes_:
    metrics['bits_per_byte'] = bits / bytes_
  if words:
    metrics['word_perplexity'] = _exp(nats / words)
  return metrics


def counts(totals: Totals) -> dict[str, float]:
  """Returns {metric: value} of what was read, even if no token was scored."""
  return {
    'padding_share': totals.padding / (totals.padding + totals.tokens),
    'tokens': totals.tokens,
  }


def label_quality(totals: Totals) -> dict[str, float]:
  """Returns {metric: value}: how well labels were predicted.

  Metrics per byte and per word are left out, because labels are not text.

  Args:
    totals: counts with at least one scored token.

  Raises:
    ValueError: no token was scored.
  """
  metrics = quality(totals)
  metrics['error'] = 1 - metrics['accuracy']
  metrics['scored_tokens'] = totals.scored
  return metrics


def speed(
  totals: Totals,
  seconds: float,
  flops_per_place: float | None = None,
  peak_flops: float | None = None,
) -> dict[str, float]:
  """Returns {metric: value}: how fast the counted steps were.

  Args:
    totals: counts of at least one step.
    seconds: wall-clock time of all counted steps together.
    flops_per_place: model FLOPs per position, which is a token or padding. They
      count the forward and the backward pass, without recomputation by remat.
      None leaves out mfu, the model FLOPs utilization.
    peak_flops: peak FLOP/s of all devices together; see flops.py. None leaves
      out mfu.
  """
  metrics = {
    'tokens_per_second': totals.tokens / seconds,
    'step_seconds': seconds / totals.steps,
  }
  if flops_per_place is not None and peak_flops is not None:
    places = totals.tokens + totals.padding
    metrics['mfu'] = flops_per_place * places / seconds / peak_flops
  return metrics


def _exp(x):
  try:
    return math.exp(x)
  except OverflowError:
    return math.inf
