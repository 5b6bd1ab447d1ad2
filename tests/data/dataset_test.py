"""Datasets with and without trivial answers."""

from meliad_rec.data.dataset import baselines
from meliad_rec.data.dataset import Dataset
from meliad_rec.data.synthetic.algorithm import Algorithm
from meliad_rec.data.synthetic.recall import Recall


def test_baselines_are_those_that_the_data_know():
  task = Algorithm(programs=20, statements=9)
  assert isinstance(task, Dataset)
  assert baselines(task, 'test') == task.baselines('test')
  assert baselines(task, 'test') != baselines(task, 'train')
  assert baselines(Recall(), 'test') == {}
