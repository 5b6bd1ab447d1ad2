"""What evaluations leave behind."""

import math

from meliad_rec.progress import Progress


def after(values, best_is='lowest', progress=None):
  progress = progress or Progress()
  for step, value in enumerate(values, 1):
    progress = progress.after(step, 'm', value, best_is)
  return progress


def test_the_best_and_how_long_ago():
  assert after([3.0, 1.0, 2.0]) == Progress(3, 'm', 1.0, 1)
  assert after([3.0, 1.0, 2.0], 'highest') == Progress(3, 'm', 3.0, 2)


def test_no_better_is_not_better():
  assert after([1.0, 1.0]).since_best == 1


def test_what_is_not_finite_is_never_best():
  assert after([math.nan]) == Progress(1, 'm', None, 1)
  assert after([math.nan, 2.0]) == Progress(2, 'm', 2.0, 0)
  assert after([2.0, math.nan]) == Progress(2, 'm', 2.0, 1)
  assert after([-math.inf, 2.0]).best == 2.0


def test_another_metric_starts_anew():
  before = Progress(5, 'other', 0.5, 3)
  assert before.after(6, 'm', 2.0, 'lowest') == Progress(6, 'm', 2.0, 0)


def test_patience():
  assert not after([1.0, 2.0]).is_stale(None)
  assert not after([1.0, 2.0]).is_stale(2)
  assert after([1.0, 2.0, 2.0]).is_stale(2)
