"""Experiments: wrong settings, and the progress of their evaluations."""

import math

import pytest

from meliad_rec.data.lanes import ShorterFirst
from meliad_rec.evaluation.evaluation import Part
from meliad_rec.training.progress import Progress
from tests import tiny_run


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  return tiny_run.write_store(tmp_path_factory.mktemp('data') / 'store')


@pytest.mark.parametrize(
  'name, value',
  [
    ('batch', 0),
    ('segment', -3),
    ('steps', 0),
    ('log_every', 0),
    ('eval_every', 0),
    ('save_every', 0),
    ('keep', 0),
    ('patience', 0),
    ('seed', -1),
    ('seed', 2**32),
    ('halting_warmup', -1),
    ('halting_warmup', 2**31),
    ('ema_decay', 1.0),
    ('best_metric', 'bits_per_bite'),
  ],
)
def test_a_setting_out_of_range_is_named(data, name, value):
  with pytest.raises(ValueError, match=f'{name} .*{value!r}. Set'):
    tiny_run.experiment(data, tiny_run.program(), **{name: value})


@pytest.mark.parametrize('segment, steps', [(16, 2), (8, 6)])
def test_initial_segments_must_be_shorter_and_few(data, segment, steps):
  with pytest.raises(ValueError, match='FIRST_SEGMENT and FIRST_STEPS'):
    tiny_run.experiment(
      data, tiny_run.program(), shorter_first=ShorterFirst(segment, steps)
    )


def test_which_value_of_the_metric_is_best(data):
  make = lambda name: tiny_run.experiment(
    data, tiny_run.program(), best_metric=name
  )
  assert make('accuracy').best_is == 'highest'
  assert make('word_perplexity').best_is == 'lowest'


def test_the_program_is_made_of_the_settings(data):
  made = tiny_run.experiment(
    data, tiny_run.program(), part=Part(1), halting_warmup=7
  )
  del made.__dict__['program']
  sizes = []
  object.__setattr__(made, 'model', sizes.append)
  assert made.program.rows == made.batch
  assert made.program.segment == made.segment
  assert made.program.halting_warmup == 7
  assert made.program is made.program
  assert sizes == [data.vocabulary.size]


def after(values, best_is='lowest', progress=None):
  progress = progress or Progress().judged_by('m', 'v')
  for step, value in enumerate(values, 1):
    progress = progress.after(step, value, best_is)
  return progress


def test_the_best_and_how_long_ago():
  assert after([3.0, 1.0, 2.0]) == Progress(3, 'm', 'v', 1.0, 1)
  assert after([3.0, 1.0, 2.0], 'highest') == Progress(3, 'm', 'v', 3.0, 2)
  assert after([1.0, 1.0]).since_best == 1


def test_non_finite_values_are_never_best():
  assert after([math.nan]) == Progress(1, 'm', 'v', None, 1)
  assert after([math.nan, 2.0]) == Progress(2, 'm', 'v', 2.0, 0)
  assert after([2.0, math.nan]) == Progress(2, 'm', 'v', 2.0, 1)
  assert after([-math.inf, 2.0]).best == 2.0


def test_another_metric_or_other_documents_restart_the_search(caplog):
  before = Progress(5, 'm', 'v', 0.5, 3)
  assert before.judged_by('m', 'v') == before
  assert Progress().judged_by('m', 'v') == Progress(0, 'm', 'v')
  assert caplog.text == ''
  for other, changed in ('x', 'v'), ('m', 'x'):
    assert before.judged_by(other, changed) == Progress(5, other, changed)
  assert 'best_metric' in caplog.text and 'validation data' in caplog.text


def test_patience():
  assert not after([1.0, 2.0]).is_stale(None)
  assert not after([1.0, 2.0]).is_stale(2)
  assert after([1.0, 2.0, 2.0]).is_stale(2)
