"""Logical inference: against slow forms and published figures."""

import collections
import dataclasses
import functools

import numpy as np
import pytest

from meliad_rec.data.synthetic import logical_inference
from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.synthetic.logical_inference import AND
from meliad_rec.data.synthetic.logical_inference import BINS
from meliad_rec.data.synthetic.logical_inference import LogicalInference
from meliad_rec.data.synthetic.logical_inference import NOT
from meliad_rec.data.synthetic.logical_inference import RELATIONS
from meliad_rec.data.synthetic.logical_inference import SYMBOLS
from meliad_rec.data.vocabulary import Words
from tests.data.synthetic.spelled import spelled

WORDS = Words([*'xyz', *SYMBOLS])
WORLDS = [
  {name: bool(world >> v & 1) for v, name in enumerate('abcdef')}
  for world in range(64)
]


def texts(tree_PN):
  """Yields the words of each formula."""
  ids_NX = logical_inference.write(tree_PN, WORDS.encode(' '.join(SYMBOLS)))
  assert ids_NX.shape[1] == logical_inference.LONGEST
  for ids_X in ids_NX:
    length = np.count_nonzero(ids_X)
    assert ids_X[:length].all()
    yield WORDS.decode(ids_X[:length])


def parse(text):
  """A formula as nested tuples of words."""
  stack = [[]]
  for word in text.split():
    if word == '(':
      stack.append([])
    elif word == ')':
      inner = tuple(stack.pop())
      stack[-1].append(inner)
    else:
      stack[-1].append(word)
  ((formula,),) = stack
  return formula


def holds(formula, world):
  """Whether a formula holds in a world."""
  match formula:
    case str():
      return world[formula]
    case ('not', inner):
      return not holds(inner, world)
    case (left, ('and', right)):
      return holds(left, world) and holds(right, world)
    case (left, ('or', right)):
      return holds(left, world) or holds(right, world)
  raise AssertionError(formula)


@functools.cache
def worlds(text):
  """The numbers of the worlds in which a formula holds."""
  formula = parse(text)
  return {n for n, world in enumerate(WORLDS) if holds(formula, world)}


def test_formulas_hold_in_the_worlds_their_words_say():
  drawn = logical_inference.draw(Draws(0), 300)
  tree_PN = drawn.reshape(logical_inference.NODES, -1)
  for text, found in zip(
    texts(tree_PN), logical_inference.worlds(tree_PN).tolist(), strict=True
  ):
    assert found == sum(1 << n for n in worlds(text))


def test_the_longest_formula_fits():
  tree_P1 = np.repeat(np.uint8([AND + NOT, 1 + NOT]), [7, 8])[:, None]
  (text,) = texts(tree_P1)
  assert len(text.split()) == logical_inference.LONGEST


TASK = LogicalInference(pairs=5000)
BIN = [f'bin_{place}' for place in range(BINS)]


def pairs(split, task=TASK):
  """Yields the two texts and the relation of each pair."""
  first_lengths = task.documents(split).first_lengths
  for middle, (words, labels) in zip(
    first_lengths, spelled(task, split), strict=True
  ):
    assert not any(labels[:-1])
    yield ' '.join(words[:middle]), ' '.join(words[middle:]), labels[-1]


def without_ends(text):
  start, *words, end = text.split()
  assert (start, end) == ('START', 'END')
  return ' '.join(words)


@pytest.mark.parametrize('split', ['train', 'bin_7'])
def test_documents_without_ends_are_otherwise_the_same(split):
  """As for TLB and GUTLB in the code of the dynamic-halt paper."""
  bare = dataclasses.replace(TASK, ends=False)
  assert bare.vocabulary.words == TASK.vocabulary.words[:-2]
  assert bare.baselines(split) == TASK.baselines(split)
  both = zip(pairs(split, bare), pairs(split), strict=True)
  for (*sides, found), (*in_ends, expected) in both:
    assert sides == [*map(without_ends, in_ends)]
    assert found == expected


def by_hand(left, right):
  """The relation of two sets of worlds, by the definitions."""
  everything = {*range(64)}
  apart, all_there_is = not left & right, left | right == everything
  if left == right:
    return '='
  if left < right or left > right:
    return '<' if left < right else '>'
  if apart:
    return '^' if all_there_is else '|'
  return 'v' if all_there_is else '#'


@pytest.mark.parametrize('split', ['train', 'test'])
def test_labels_follow_from_the_words(split):
  seen = set()
  for *sides, found in pairs(split):
    left, right = map(worlds, map(without_ends, sides))
    assert 0 < len(left) < 64 and 0 < len(right) < 64
    assert found == by_hand(left, right)
    seen.add(found)
  assert seen == {*RELATIONS}


def test_a_bin_is_the_greater_number_of_operators():
  together = []
  for place, split in enumerate(BIN):
    for *sides, _ in pairs(split):
      most = max(
        sum(text.split().count(word) for word in ('and', 'or', 'not'))
        for text in sides
      )
      assert min(most, 12) == place
      together.append(sides)
  assert sorted(together) == sorted(sides for *sides, _ in pairs('test'))


@pytest.mark.parametrize('split', ['validation', 'test'])
def test_the_first_documents_are_of_all_bins(split):
  bins = TASK._bin_N[TASK._split(split)]
  first = np.bincount(bins[: len(bins) // 4], minlength=BINS)
  whole = np.bincount(bins, minlength=BINS)
  assert np.abs(first - whole / 4).max() < 5 * np.sqrt(whole.max() / 4)
  assert (np.diff(bins) < 0).any()


@pytest.mark.parametrize('most', [0, 6])
def test_train_has_85_percent_of_its_bins_except_every_tenth_pair(most):
  task = LogicalInference(pairs=5000, train_operators=most)
  counts = np.bincount(task._bin_N, minlength=BINS)
  trained = [count * 85 // 100 for count in counts]
  sizes = {split: len(task.documents(split)) for split in task.splits}
  whole = sum(trained[: most + 1])
  assert sizes['train'] == whole - whole // 10
  assert sizes['validation'] == whole // 10
  assert sizes['test'] == sum(counts) - sum(trained)
  assert [sizes[split] for split in BIN] == (counts - trained).tolist()


def test_baselines_equal_a_slow_form():
  seen = collections.Counter(found for *_, found in pairs('train'))
  ((likeliest, _),) = seen.most_common(1)
  wrong = [found != likeliest for *_, found in pairs('bin_7')]
  found = TASK.baselines('bin_7')
  assert found['uniform'] == pytest.approx(6 / 7)
  assert found['likeliest'] == pytest.approx(np.mean(wrong))


# Pairs in bins 1 to 12 of the published files.
PUBLISHED = [2729, 14649, 27356, 35734, 40179, 38768]
PUBLISHED += [31378, 22309, 14864, 9625, 5758, 5684]


def test_bins_have_the_published_sizes():
  """Within 3 standard deviations."""
  task = LogicalInference()
  found = np.bincount(task._bin_N)
  assert found[0] == 36  # All that exist.
  for a, b in zip(found[1:], PUBLISHED, strict=True):
    assert abs(a - b) < 3 * np.sqrt(a + b)
  sizes = [len(task._split(split)) for split in ('train', 'validation')]
  np.testing.assert_allclose(sizes, [121_977, 13_552], rtol=0.005)
  always = task.baselines('train')['likeliest']
  assert 0.44 < always < 0.5
