"""What stands for data: nothing is looked up, whatever the task."""

import sys

import pytest

from meliad_rec.config import config
from meliad_rec.planning import no_data
from meliad_rec.training.experiment import Experiment

FILES = ['arch/window', 'size/tiny']


@pytest.fixture(autouse=True)
def forget():
  yield
  config.reset()


def experiment(task, params=(), vocab_size=None):
  files = [*FILES, f'task/{task}']
  instead = no_data.bindings(files, params, vocab_size)
  config.parse(files, [*params, *instead])
  return config.build(Experiment)()


def test_text_is_left_out_but_for_its_vocabulary(monkeypatch):
  monkeypatch.setitem(sys.modules, 'seqio', None)  # Not to be imported.
  found = experiment('pg19')
  assert found.data.vocabulary.size == 259
  with pytest.raises(ValueError, match='reads no data'):
    found.data.documents('train')


def test_generated_data_are_as_they_are():
  assert no_data.bindings([*FILES, 'task/recall'], [], None) == ()


@pytest.mark.parametrize(
  'task, param', [('store', 'STORE'), ('jsonl', 'JSONL')]
)
def test_a_size_stands_for_any_data(task, param):
  found = experiment(task, [f'{param} = "/nowhere"'], 1000)
  assert found.data.vocabulary.size == 1000
  assert list(found.data.splits) == []


def test_files_are_read_in_the_order_of_their_kinds(tmp_path):
  """An option corrects a task, on whichever side of it it stands."""
  (tmp_path / 'options').mkdir()
  own = tmp_path / 'options' / 'own.gin'
  own.write_text("""
from __gin__ import dynamic_registration
from meliad_rec.training import experiment
from meliad_rec.data.synthetic import recall
experiment.Experiment.data = @recall.Recall()
""")
  after = no_data.bindings([*FILES, 'task/pg19', str(own)], [], None)
  before = no_data.bindings([str(own), *FILES, 'task/pg19'], [], None)
  assert before == after == ()
