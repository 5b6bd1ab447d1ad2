"""Generated sequences have the frequencies that their tasks describe."""

import numpy as np
import pytest

from meliad_rec.data.synthetic import pathfinder
from meliad_rec.data.synthetic.arithmetic import Arithmetic
from meliad_rec.data.synthetic.cellular_automaton import CellularAutomaton
from meliad_rec.data.synthetic.copying import Copying
from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.synthetic.pathfinder import Pathfinder
from meliad_rec.data.synthetic.word_problem import group
from meliad_rec.data.synthetic.word_problem import WordProblem
from tests.data.synthetic.spelled import spelled


def check_even(values, classes):
  """Checks by a chi-squared test that all classes are equally frequent."""
  names, counts = np.unique(np.asarray(values), return_counts=True)
  assert len(names) == classes
  expected = counts.sum() / classes
  free = classes - 1
  found = ((counts - expected) ** 2 / expected).sum()
  assert abs(found - free) < 5 * np.sqrt(2 * free), counts


def joined(task, split='train'):
  """Returns the words of all sequences, and the labels of all, one array each.

  A word without a label has the label None.
  """
  words, labels = zip(*spelled(task, split), strict=True)
  return np.concatenate(words), np.concatenate(labels)


@pytest.mark.parametrize('backward', [False, True])
def test_digits_to_copy_are_even(backward):
  words, labels = joined(Copying(sequences=500, backward=backward))
  check_even(labels[labels != None], 10)  # noqa: E711
  check_even(words[words != '='], 10)


@pytest.mark.parametrize('name', ['Z2', 'S3', 'A5', 'S5'])
def test_elements_and_products_of_a_group_are_even(name):
  words, labels = joined(WordProblem(group=name, sequences=2000))
  size = len(group(name)[0])
  check_even(words, size)
  check_even(labels, size)


@pytest.mark.parametrize('brackets', [False, True])
def test_digits_and_operators_of_expressions_are_even(brackets):
  words, labels = joined(Arithmetic(brackets=brackets, sequences=10_000))
  check_even(words[np.isin(words, [*'01234'])], 5)
  check_even(words[np.isin(words, [*'+-*'])], 3)
  values = labels[labels != None]  # noqa: E711
  assert len(values) == 10_000


def test_how_often_an_expression_with_brackets_is_0():
  """The shares that the module states."""
  task = Arithmetic(brackets=True, sequences=20_000, test_sequences=10_000)
  for split, share in ('train', 0.27), ('test_256', 0.31):
    _, labels = joined(task, split)
    values = labels[labels != None]  # noqa: E711
    assert abs((values == '0').mean() - share) < 0.01


def test_rules_and_first_rings_of_automata_are_fair():
  task = CellularAutomaton(sequences=1)
  rule_NR = task._rules(4000, Draws(0), True)
  ones_R = rule_NR.mean(0)
  assert abs(ones_R - 0.5).max() < 5 * 0.5 / np.sqrt(4000)
  # A ring of random cells stays fair under the mean of all rules.
  words, _ = joined(CellularAutomaton(sequences=500))
  cells = words[np.isin(words, ['0', '1'])]
  assert abs((cells == '1').mean() - 0.5) < 0.02


def test_the_hard_images_of_pathfinder(monkeypatch):
  """Two paths of 14 dashes, five others of 4, and both classes alike."""
  monkeypatch.setattr(pathfinder, '_CHUNK', 128)
  drawn = []
  path = Pathfinder._path

  def counted(self, draws, blocked, dashes, **options):
    drawn.append(dashes)
    return path(self, draws, blocked, dashes, **options)

  monkeypatch.setattr(Pathfinder, '_path', counted)
  labels = [label for *_, label in Pathfinder(images=100).examples('train')]
  assert abs(np.mean(labels) - 0.5) < 5 * 0.5 / np.sqrt(100)
  assert set(drawn) == {4, 14}
  assert drawn.count(4) % 5 == 0 and drawn.count(14) % 4 == 0
