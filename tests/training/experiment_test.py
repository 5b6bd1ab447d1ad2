"""Settings that cannot be, each told in one sentence."""

import pytest

from meliad_rec.data.lanes import ShorterFirst
from meliad_rec.evaluation.evaluation import Part
from tests import tiny_run


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  return tiny_run.write_store(tmp_path_factory.mktemp('data') / 'store')


@pytest.mark.parametrize(
  'name, value, needed',
  [
    ('batch', 0, '1 or more'),
    ('segment', -3, '1 or more'),
    ('steps', 0, '1 or more'),
    ('log_every', 0, '1 or more'),
    ('eval_every', 0, '1 or more'),
    ('save_every', 0, '1 or more'),
    ('keep', 0, '1 or more'),
    ('patience', 0, '1 or more'),
    ('seed', -1, '0 or more, and below'),
    ('seed', 2**32, '0 or more, and below 2..32'),
    ('halting_warmup', -1, '0 or more, and below'),
    ('halting_warmup', 2**31, '0 or more, and below 2..31'),
    ('ema_decay', 1.0, 'None, or between 0 and 1'),
    ('best_metric', 'bits_per_bite', 'one of bits_per_byte, '),
  ],
)
def test_a_setting_out_of_range_is_named(data, name, value, needed):
  said = rf'^{name} is {value!r}; it must be {needed}.* Set experiment\.Exp'
  with pytest.raises(ValueError, match=said):
    tiny_run.experiment(data, tiny_run.program(), **{name: value})


@pytest.mark.parametrize('segment, steps', [(16, 2), (8, 6)])
def test_shorter_segments_must_be_shorter_and_first(data, segment, steps):
  with pytest.raises(ValueError, match='FIRST_SEGMENT and FIRST_STEPS to less'):
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
