"""Levels of brackets, as the task of nested lists counts them."""

import numpy as np

from meliad_rec.data.generated import listops_trees
from meliad_rec.data.generated.draws import Draws
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.data.word_vocabulary import Words
from meliad_rec.halting_depth import nesting

LISTOPS = listops_trees.VOCABULARY
STEPS = nesting.bracket_steps(LISTOPS)


def test_levels_of_an_expression():
  ids = LISTOPS.encode('START [MAX 2 [MIN 4 7 ] 0 ] END')
  assert nesting.levels(STEPS, ids).tolist() == [0, 0, 1, 1, 2, 2, 1, 1, 0, 0]
  assert nesting.deepest(STEPS, ids) == 2


def test_levels_of_a_formula():
  words = Words(['a', '(', ')', 'or'])
  steps = nesting.bracket_steps(words)
  ids = words.encode(') ( a or ( a ) ) a')
  assert nesting.levels(steps, ids).tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0]
  ids = words.encode('( ( a ) or a )')
  assert nesting.levels(steps, ids).tolist() == [0, 1, 2, 1, 1, 1, 0]


def test_a_word_in_brackets_of_its_own_opens_none():
  assert nesting.bracket_steps(Words(['(a)', 'b'])) is None
  steps = nesting.bracket_steps(Words(['(a)', '[', 'b]']))
  assert steps.tolist() == [0, 0, 1, -1]


def test_the_deepest_is_that_of_the_task():
  levels = listops_trees.grow(Draws(0), 300, 4, 6)
  tokens, starts, _ = listops_trees.write(levels)
  found = set()
  for begin, end in zip(starts, starts[1:], strict=False):
    expected = listops_trees.nesting(tokens[begin:end])
    assert nesting.deepest(STEPS, tokens[begin:end]) == expected
    assert nesting.levels(STEPS, tokens[begin:end]).max() == expected
    found.add(expected)
  assert len(found) > 4


def test_words_without_brackets():
  assert nesting.bracket_steps(Words(['a', 'b'])) is None
  assert nesting.bracket_steps(Bytes()) is None
  assert nesting.deepest(STEPS, np.zeros(0, int)) == 0
