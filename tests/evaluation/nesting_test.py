"""Levels of brackets, as the task of nested lists counts them."""

import numpy as np

from meliad_rec.data.synthetic import listops
from meliad_rec.data.synthetic.labelled import Draws
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.data.vocabulary import Words
from meliad_rec.evaluation import depth

LISTOPS = listops.VOCABULARY
STEPS = depth.bracket_steps(LISTOPS)


def test_levels_of_an_expression():
  ids = LISTOPS.encode('START [MAX 2 [MIN 4 7 ] 0 ] END')
  assert depth.levels(STEPS, ids).tolist() == [0, 0, 1, 1, 2, 2, 1, 1, 0, 0]
  assert depth.deepest(STEPS, ids) == 2


def test_levels_of_a_formula():
  words = Words(['a', '(', ')', 'or'])
  steps = depth.bracket_steps(words)
  ids = words.encode(') ( a or ( a ) ) a')
  assert depth.levels(steps, ids).tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0]
  ids = words.encode('( ( a ) or a )')
  assert depth.levels(steps, ids).tolist() == [0, 1, 2, 1, 1, 1, 0]


def test_a_word_in_brackets_of_its_own_opens_none():
  assert depth.bracket_steps(Words(['(a)', 'b'])) is None
  steps = depth.bracket_steps(Words(['(a)', '[', 'b]']))
  assert steps.tolist() == [0, 0, 1, -1]


def test_the_deepest_is_that_of_the_task():
  levels = listops.grow(Draws(0), 300, 4, 6)
  tokens, starts, _ = listops.write(levels)
  found = set()
  for begin, end in zip(starts, starts[1:], strict=False):
    expected = listops.nesting(tokens[begin:end])
    assert depth.deepest(STEPS, tokens[begin:end]) == expected
    assert depth.levels(STEPS, tokens[begin:end]).max() == expected
    found.add(expected)
  assert len(found) > 4


def test_words_without_brackets():
  assert depth.bracket_steps(Words(['a', 'b'])) is None
  assert depth.bracket_steps(Bytes()) is None
  assert depth.deepest(STEPS, np.zeros(0, int)) == 0
