"""What evaluations leave behind."""

import math

import pytest

from meliad_rec.training.progress import Progress


def after(values, best_is='lowest', progress=None):
  progress = progress or Progress().judged_by('m', 'v')
  for step, value in enumerate(values, 1):
    progress = progress.after(step, value, best_is)
  return progress


def test_the_best_and_how_long_ago():
  assert after([3.0, 1.0, 2.0]) == Progress(3, 'm', 'v', 1.0, 1)
  assert after([3.0, 1.0, 2.0], 'highest') == Progress(3, 'm', 'v', 3.0, 2)


def test_no_better_is_not_better():
  assert after([1.0, 1.0]).since_best == 1


def test_what_is_not_finite_is_never_best():
  assert after([math.nan]) == Progress(1, 'm', 'v', None, 1)
  assert after([math.nan, 2.0]) == Progress(2, 'm', 'v', 2.0, 0)
  assert after([2.0, math.nan]) == Progress(2, 'm', 'v', 2.0, 1)
  assert after([-math.inf, 2.0]).best == 2.0


@pytest.mark.parametrize(
  'metric, validation, said',
  [('other', 'v', 'best_metric'), ('m', 'other', 'validation data')],
)
def test_another_metric_or_other_documents_start_anew(
  metric, validation, said, caplog
):
  before = Progress(5, metric, validation, 0.5, 3)
  now = before.judged_by('m', 'v')
  assert now == Progress(5, 'm', 'v')
  assert not now.is_stale(3)
  assert f'The {said} of this run changed' in caplog.text


def test_the_same_goes_on_and_a_first_one_is_not_told(caplog):
  before = Progress(5, 'm', 'v', 0.5, 3)
  assert before.judged_by('m', 'v') == before
  assert Progress().judged_by('m', 'v') == Progress(0, 'm', 'v')
  assert caplog.text == ''


def test_patience():
  assert not after([1.0, 2.0]).is_stale(None)
  assert not after([1.0, 2.0]).is_stale(2)
  assert after([1.0, 2.0, 2.0]).is_stale(2)
