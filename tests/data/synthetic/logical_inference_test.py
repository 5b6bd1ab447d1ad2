"""Logical inference: against slow forms and published figures."""

import collections
import dataclasses
import itertools
import random

import numpy as np
import pytest

from meliad_rec.data.synthetic import logical_inference
from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.synthetic.logical_inference import AND
from meliad_rec.data.synthetic.logical_inference import BINS
from meliad_rec.data.synthetic.logical_inference import LogicalInference
from meliad_rec.data.synthetic.logical_inference import NOT
from meliad_rec.data.synthetic.logical_inference import OR
from meliad_rec.data.synthetic.logical_inference import relation
from meliad_rec.data.synthetic.logical_inference import RELATIONS
from meliad_rec.data.synthetic.logical_inference import SYMBOLS
from meliad_rec.data.vocabulary import Words

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


@pytest.fixture(scope='module')
def drawn():
  return logical_inference.draw(Draws(0), 300)


def test_formulas_hold_in_the_worlds_their_words_say(drawn):
  tree_PN = drawn.reshape(logical_inference.NODES, -1)
  found_N = logical_inference.worlds(drawn).ravel().tolist()
  for text, found in zip(texts(tree_PN), found_N, strict=True):
    formula = parse(text)
    expected = [holds(formula, world) for world in WORLDS]
    assert [bool(found >> w & 1) for w in range(64)] == expected


def test_operators_are_counted(drawn):
  found_N = logical_inference.operators(drawn).ravel()
  for text, found in zip(
    texts(drawn.reshape(logical_inference.NODES, -1)), found_N, strict=True
  ):
    words = text.split()
    assert found == sum(words.count(word) for word in ('and', 'or', 'not'))


def column(nodes):
  tree_P1 = np.zeros((logical_inference.NODES, 1), np.uint8)
  for i, node in nodes.items():
    tree_P1[i] = node
  return tree_P1


@pytest.mark.parametrize(
  ('nodes', 'text'),
  [
    ({0: 2}, 'b'),
    ({0: 6 + NOT}, '( not f )'),
    ({0: AND, 1: 1, 2: 1}, '( a ( and a ) )'),
    (
      {0: OR, 1: 1 + NOT, 2: AND, 5: 2, 6: 3},
      '( ( not a ) ( or ( b ( and c ) ) ) )',
    ),
    (
      {0: AND + NOT, 1: OR, 3: AND, 7: 4, 8: 5, 4: 6, 2: 2},
      '( not ( ( ( d ( and e ) ) ( or f ) ) ( and b ) ) )',
    ),
  ],
)
def test_words_by_hand(nodes, text):
  tree_P1 = column(nodes)
  assert [*texts(tree_P1)] == [text]
  by_hand = sum(
    holds(parse(text), world) << number for number, world in enumerate(WORLDS)
  )
  assert logical_inference.worlds(tree_P1).tolist() == [by_hand]


def test_the_longest_formula():
  inner = dict.fromkeys(range(7), AND + NOT)
  tree_P1 = column(inner | dict.fromkeys(range(7, 15), 1 + NOT))
  (text,) = texts(tree_P1)
  assert len(text.split()) == logical_inference.LONGEST


def test_a_pair_has_four_variables_of_six(drawn):
  used = set()
  for pair_P2 in drawn.transpose(2, 0, 1):
    kinds = pair_P2 % NOT
    names = set(kinds[(kinds > 0) & (kinds < AND)].tolist())
    assert len(names) <= 4
    if len(names) == 4:
      used.add(tuple(sorted(names)))
  assert used <= {*itertools.combinations(range(1, 7), 4)}
  assert len(used) == 15


def slow(rng, variables, longest=12):
  """A formula, drawn as the published generator does."""
  operator = rng.choice(['and', 'or', 'and', 'or', *[None] * 5])
  if operator is None or longest < 2:
    made = rng.choice(variables)
  else:
    left, right = (slow(rng, variables, longest // 2) for _ in range(2))
    made = f'( {left} ( {operator} {right} ) )'
  return f'( not {made} )' if rng.randrange(3) == 0 else made


def test_formulas_are_as_frequent_as_in_the_slow_form():
  """By length, operators and the text of short ones, within 5 standard
  deviations."""
  rng, count = random.Random(0), 8000
  tree_PN = logical_inference.draw(Draws(1), count)[:, 0]
  others = (slow(rng, rng.sample('abcdef', k=4)) for _ in range(count))
  tallies = [collections.Counter(), collections.Counter()]
  for tally, some in zip(tallies, (texts(tree_PN), others), strict=True):
    for text in some:
      words = text.split()
      for operator in ('and', 'or', 'not'):
        tally[operator, words.count(operator)] += 1
      tally[len(words)] += 1
      tally[text if len(words) < 8 else 'long'] += 1
  for each in tallies[0] | tallies[1]:
    a, b = (tally[each] for tally in tallies)
    assert abs(a - b) < 5 * np.sqrt(a + b + 1), each


TASK = LogicalInference(pairs=5000)
BIN = [f'bin_{place}' for place in range(BINS)]


def pairs(split, task=TASK):
  """Yields the two texts and the relation of each pair."""
  documents, words = task.documents(split), task.vocabulary
  for i, middle in enumerate(documents.first_lengths):
    tokens, labels = documents.read(i, 0, documents.lengths[i])
    assert not labels[:-1].any()
    sides = []
    for ids in (tokens[:middle], tokens[middle:]):
      start, *text, end = words.decode(ids).split()
      assert (start, end) == ('START', 'END')
      sides.append(' '.join(text))
    yield *sides, words.words[labels[-1] - 1]


@pytest.mark.parametrize('split', ['train', 'validation', 'bin_0', 'bin_7'])
def test_documents_without_ends_are_otherwise_the_same(split):
  """As for TLB and GUTLB in the code of the dynamic-halt paper."""
  bare = dataclasses.replace(TASK, ends=False)
  assert bare.vocabulary.words == TASK.vocabulary.words[:-2]
  assert bare.baselines(split) == TASK.baselines(split)
  found, words = bare.documents(split), bare.vocabulary
  for i, (left, right, relation_) in enumerate(pairs(split)):
    tokens, labels = found.read(i, 0, found.lengths[i])
    middle = found.first_lengths[i]
    assert words.decode(tokens[:middle]) == left
    assert words.decode(tokens[middle:]) == right
    assert not labels[:-1].any() and words.words[labels[-1] - 1] == relation_
    assert found.bytes_[i] == len(f'{left} {right}')
  assert len(found) == len(TASK.documents(split))


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


@pytest.mark.parametrize('split', ['train', 'validation', 'test'])
def test_labels_follow_from_the_words(split):
  seen = collections.Counter()
  for *sides, found in pairs(split):
    left, right = (
      {w for w in range(64) if holds(parse(text), WORLDS[w])} for text in sides
    )
    assert 0 < len(left) < 64 and 0 < len(right) < 64
    assert found == by_hand(left, right)
    seen[found] += 1
  assert set(seen) == {*RELATIONS} or split == 'validation'


@pytest.mark.parametrize(
  ('left', 'right', 'found'),
  [
    ({1, 2}, {1, 2}, '='),
    ({1}, {1, 2}, '<'),
    ({1, 2}, {2}, '>'),
    ({*range(10)}, {*range(10, 64)}, '^'),
    ({1}, {2, 5}, '|'),
    ({*range(40)}, {*range(39, 64)}, 'v'),
    ({1, 2}, {2, 3}, '#'),
  ],
)
def test_relations_by_hand(left, right, found):
  assert by_hand(left, right) == found
  sets = (
    np.array([sum(1 << world for world in side)], np.uint64)
    for side in (left, right)
  )
  assert RELATIONS[relation(*sets)[0] - 1] == found


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


@pytest.mark.parametrize('most', [0, 3, 6])
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


def test_the_vocabulary():
  assert TASK.vocabulary.words[:7] == RELATIONS
  assert TASK.vocabulary.size == 1 + 7 + 11 + 2


def test_baselines_equal_a_slow_form():
  (likeliest, _), *_ = collections.Counter(
    found for *_, found in pairs('train')
  ).most_common()
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
  sizes = [len(task.documents(split)) for split in ('train', 'validation')]
  np.testing.assert_allclose(sizes, [121_977, 13_552], rtol=0.005)
  sides = lambda split: np.maximum(
    task.documents(split).first_lengths,
    task.documents(split).lengths - task.documents(split).first_lengths,
  )
  assert sides('train').max() == 37 + 2
  assert sides('test').max() <= 90 + 2
  always = task.baselines('train')['likeliest']
  assert 0.44 < always < 0.5
  labels = task.documents('train').labels
  hash_sign = RELATIONS.index('#') + 1
  assert np.mean(labels[labels > 0] != hash_sign) == pytest.approx(always)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: LogicalInference(pairs=0), 'got 0..*pairs'),
    (
      lambda: LogicalInference(train_operators=13),
      'from 0 to 12, got 13..*train_operators',
    ),
    (lambda: TASK.documents('bin_13'), "'bin_13'"),
    (
      lambda: LogicalInference(pairs=9).documents('bin_12'),
      'bin_12. .* logical_inference.LogicalInference.pairs',
    ),
  ],
)
def test_invalid_settings_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()
