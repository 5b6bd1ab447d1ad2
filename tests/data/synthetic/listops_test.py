"""ListOps: against a stack machine, a slow generator, published figures."""

import collections
import dataclasses
import itertools
import random
import statistics

import numpy as np
import pytest

from meliad_rec.data.dataset import HasBaselines
from meliad_rec.data.synthetic import listops
from meliad_rec.data.synthetic import listops_trees
from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.synthetic.listops import ListOps
from meliad_rec.data.synthetic.listops_trees import grow
from meliad_rec.data.synthetic.listops_trees import Lengths
from meliad_rec.data.synthetic.listops_trees import Level
from meliad_rec.data.synthetic.listops_trees import mean_length
from meliad_rec.data.synthetic.listops_trees import nesting
from meliad_rec.data.synthetic.listops_trees import VOCABULARY
from meliad_rec.data.synthetic.listops_trees import write

EVALUATE = {
  '[MIN': min,
  '[MAX': max,
  '[MED': lambda values: int(statistics.median(values)),
  '[SM': lambda values: sum(values) % 10,
}


def run(words):
  """The value of an expression, and its deepest nesting."""
  stack, deepest = [[]], 0
  for word in words:
    if word in EVALUATE:
      stack.append([word])
    elif word == ']':
      operator, *values = stack.pop()
      assert len(values) > 1
      stack[-1].append(EVALUATE[operator](values))
    else:
      stack[-1].append(int(word))
    deepest = max(deepest, len(stack) - 1)
  ((value,),) = stack
  return value, deepest


def texts(levels):
  """Yields the ids and the value of each expression."""
  tokens, starts, values_N = write(levels)
  assert starts[0] == 0 and starts[-1] == len(tokens)
  assert len(values_N) == len(starts) - 1
  for begin, end, value in zip(starts, starts[1:], values_N, strict=False):
    yield tokens[begin:end], value


@pytest.mark.parametrize(('args', 'depth'), [(5, 20), (2, 4), (9, 3)])
def test_values_are_those_of_a_stack_machine(args, depth):
  seen = collections.Counter()
  for ids, value in texts(grow(Draws(0), 3000, args, depth)):
    words = VOCABULARY.decode(ids).split()
    assert run(words) == (value, nesting(ids))
    assert nesting(ids) < depth
    seen.update(words)
  assert set(seen) == {*EVALUATE, ']', *'0123456789'}


@pytest.mark.parametrize(
  ('text', 'value', 'deep'),
  [
    ('7', 7, 0),
    ('[MED 1 8 ]', 4, 1),
    ('[MED 9 0 5 ]', 5, 1),
    ('[SM 9 9 4 ]', 2, 1),
    ('[MIN 3 [MAX 2 [SM 9 9 ] 1 ] [MED 7 7 ] ]', 3, 3),
  ],
)
def test_values_by_hand(text, value, deep):
  assert run(text.split()) == (value, deep)
  assert nesting(VOCABULARY.encode(text)) == deep
  assert nesting(VOCABULARY.encode(f'START {text} END')) == deep


def test_levels_are_in_the_order_of_their_parents():
  ids = lambda text: VOCABULARY.encode(text)
  levels = [
    Level(ids('[SM 4 [MAX'), np.array([3, 0, 2])),
    Level(ids('1 [MIN 2 8 9'), np.array([0, 2, 0, 0, 0])),
    Level(ids('6 5'), np.array([0, 0])),
  ]
  found = [(VOCABULARY.decode(ids), value) for ids, value in texts(levels)]
  assert found == [('[SM 1 [MIN 6 5 ] 2 ]', 8), ('4', 4), ('[MAX 8 9 ]', 9)]


def slow(rng, args, max_depth, depth=1):
  """An expression, drawn as the published generator does."""
  if depth == max_depth or rng.random() > 0.25:
    return [str(rng.randint(0, 9))]
  inner = [
    slow(rng, args, max_depth, depth + 1) for _ in range(rng.randint(2, args))
  ]
  return [rng.choice([*EVALUATE]), *sum(inner, []), ']']


@pytest.mark.parametrize(('args', 'depth'), [(4, 5), (2, 20)])
def test_expressions_are_as_frequent_as_in_the_slow_form(args, depth):
  """By length, nesting and first word, within 5 standard deviations."""
  rng, count = random.Random(0), 6000
  every = [
    [
      VOCABULARY.decode(ids).split()
      for ids, _ in texts(grow(Draws(1), count, args, depth))
    ],
    [slow(rng, args, depth) for _ in range(count)],
  ]
  tallies = [collections.Counter(), collections.Counter()]
  for tally, expressions in zip(tallies, every, strict=True):
    for words in expressions:
      tally[min(len(words), 40), run(words)[1]] += 1
      tally[words[0]] += 1
  for each in tallies[0] | tallies[1]:
    fast, other = (tally[each] for tally in tallies)
    assert abs(fast - other) < 5 * np.sqrt(fast + other + 1), each


@pytest.mark.parametrize(('args', 'depth'), [(5, 20), (5, 3), (8, 6), (2, 1)])
def test_the_mean_length_is_right(args, depth):
  found = np.diff(write(grow(Draws(0), 50_000, args, depth)).starts)
  error = 5 * found.std() / np.sqrt(len(found))
  assert abs(found.mean() - mean_length(args, depth)) <= error


def test_distinct_expressions_are_in_the_order_drawn():
  draws, kept = Draws(2), []

  def grow_some():
    kept.append(grow(draws, 40, 3, 3))
    return kept[-1]

  taken = {bytes([4])}
  found = listops_trees.distinct(grow_some, 25, 'x', taken)
  drawn = [(ids.tobytes(), v) for levels in kept for ids, v in texts(levels)]
  expected = dict(one for one in drawn if one[0] not in taken)
  assert [*found.items()] == [*expected.items()][:25]
  assert len(kept) > 1


def test_too_few_distinct_expressions_are_reported():
  draws = Draws(0)
  with pytest.raises(ValueError, match='^99 .* 10. Increase x'):
    listops_trees.distinct(lambda: grow(draws, 500, 2, 1), 99, 'x')


def by_hand(args, max_depth, depth=1):
  """Probabilities of all lengths, summed over all expressions."""
  shares = collections.Counter({1: 1.0 if depth == max_depth else 0.75})
  if depth < max_depth:
    inner = by_hand(args, max_depth, depth + 1)
    for k in range(2, args + 1):
      for lengths in itertools.product(inner, repeat=k):
        share = np.prod([inner[n] for n in lengths])
        shares[2 + sum(lengths)] += 0.25 / (args - 1) * share
  return shares


@pytest.mark.parametrize(('args', 'depth'), [(3, 3), (2, 4), (4, 2), (5, 1)])
def test_probabilities_of_lengths_are_exact(args, depth):
  lengths = Lengths(args, depth, 60)
  expected = by_hand(args, depth)
  for n in range(1, 61):
    assert lengths.share(n, n) == pytest.approx(expected[n])
  assert lengths.share(1, 60) == pytest.approx(1)


# Measured by drawing expressions in another program.
ACCEPTED = {
  (5, 20, 201, 299): 4.7e-3,
  (5, 20, 501, 599): 4.0e-4,
  (5, 20, 901, 999): 1.3e-5,
  (5, 9, 100, 1000): 1.1e-2,
  (10, 9, 100, 1000): 0.118,
  (15, 9, 100, 1000): 0.022,
  (10, 10, 501, 1999): 0.083,
}


@pytest.mark.parametrize('bounds', ACCEPTED)
def test_probabilities_of_lengths_are_those_measured(bounds):
  args, depth, shortest, longest = bounds
  found = Lengths(args, depth, longest).share(shortest, longest)
  assert found == pytest.approx(ACCEPTED[bounds], rel=0.05)


def features(levels, shortest, longest):
  """Yields length, nesting, arguments and two words of each expression."""
  tokens, starts, _ = write(levels)
  for begin, end, arguments in zip(
    starts, starts[1:], levels[0].arguments_N, strict=False
  ):
    ids = tokens[begin:end]
    if shortest <= len(ids) <= longest:
      # The second to last word: a digit or a closing bracket.
      yield len(ids), nesting(ids), int(arguments), int(ids[0]), int(ids[-2])


@pytest.mark.parametrize(('args', 'depth'), [(5, 20), (3, 4)])
def test_given_lengths_have_the_same_distribution_as_rejection(args, depth):
  """Each feature within 5 standard deviations."""
  drawn = [*features(grow(Draws(0), 100_000, args, depth), 14, 17)]
  made = Lengths(args, depth, 30).grow(Draws(1), len(drawn), 14, 17)
  made = [*features(made, 14, 17)]
  assert len(made) == len(drawn) > 1000
  tallies = [collections.Counter(), collections.Counter()]
  for tally, some in zip(tallies, (drawn, made), strict=True):
    for fact in some:
      tally.update(enumerate(fact))
      tally[fact[:3]] += 1
  for each in tallies[0] | tallies[1]:
    a, b = (tally[each] for tally in tallies)
    assert abs(a - b) < 5 * np.sqrt(a + b + 1), each


def test_long_expressions_have_the_given_length():
  levels = Lengths(5, 20, 700).grow(Draws(0), 50, 690, 700)
  lengths = np.diff(write(levels).starts)
  assert lengths.min() >= 690 and lengths.max() <= 700
  assert len(set(lengths.tolist())) > 8
  assert len(levels) <= 20


TASK = ListOps(trees=2000, max_length=30, test_trees=40)
ALIKE = 'train', 'validation', 'test', 'test_short'
LENGTHS = [f'length_{n}_{n + 100}' for n in range(200, 1000, 100)]


def documents_of(split, task=TASK):
  documents = task.documents(split)
  return [documents[i].tobytes() for i in range(len(documents))]


@pytest.mark.parametrize('split', TASK.splits)
def test_the_label_of_the_last_token_is_the_value(split):
  documents = TASK.documents(split)
  assert documents.labels[documents.starts[1:] - 1].all()
  assert (documents.labels > 0).sum() == len(documents)
  for i in range(len(documents)):
    tokens, labels = documents.read(i, 0, documents.lengths[i])
    text = TASK.vocabulary.decode(tokens)
    start, *words, end = text.split()
    assert (start, end) == ('START', 'END')
    value, deep = run(words)
    assert TASK.vocabulary.words[labels[-1] - 1] == str(value)
    assert nesting(tokens) == deep
    assert documents.bytes_[i] == len(text)
    assert documents.words[i] == len(words) + 2


@pytest.mark.parametrize('split', ['train', 'validation', 'args_5'])
def test_documents_without_ends_are_otherwise_the_same(split):
  """As for TLB and GUTLB in the code of the dynamic-halt paper."""
  bare = dataclasses.replace(TASK, ends=False)
  assert bare.vocabulary.words == TASK.vocabulary.words[:-2]
  assert bare.baselines(split) == TASK.baselines(split)
  found, whole = bare.documents(split), TASK.documents(split)
  assert len(found) == len(whole)
  for i in range(len(found)):
    tokens, labels = found.read(i, 0, found.lengths[i])
    in_ends, of_end = whole.read(i, 0, whole.lengths[i])
    np.testing.assert_array_equal(tokens, in_ends[1:-1])
    assert labels[-1] == of_end[-1] and not labels[:-1].any()
    assert found.bytes_[i] == len(bare.vocabulary.decode(tokens))


def test_counts():
  assert isinstance(TASK, HasBaselines)
  beyond = [*LENGTHS, 'args_5', 'args_10', 'args_15', 'lra']
  assert TASK.splits == (*ALIKE, *beyond)
  whole = ListOps(trees=2000, max_length=10**6, test_trees=1)
  sizes = [len(whole.documents(split)) for split in ALIKE]
  assert sizes == [1780, 20, 200, 200]
  assert documents_of('test', whole) == documents_of('test')
  for split in set(ALIKE) - {'test'}:
    fitting = [
      text for text in documents_of(split, whole) if len(text) <= 2 * 32
    ]
    assert documents_of(split) == fitting
  assert max(map(len, documents_of('test'))) > 2 * 32
  assert {len(TASK.documents(split)) for split in beyond} == {40}


@pytest.mark.parametrize('split', LENGTHS)
def test_lengths_are_between_the_bounds(split):
  _, a, b = split.split('_')
  lengths = TASK.documents(split).lengths - 2
  assert int(a) < lengths.min() and lengths.max() < int(b)
  assert np.ptp(lengths) > 50


@pytest.mark.parametrize(
  ('split', 'args', 'deepest', 'shortest', 'longest'),
  [
    ('args_5', 5, 8, 100, 1000),
    ('args_10', 10, 8, 100, 1000),
    ('args_15', 15, 8, 100, 1000),
    ('lra', 10, 9, 501, 1999),
  ],
)
def test_arguments_and_depth(split, args, deepest, shortest, longest):
  documents = TASK.documents(split)
  lengths = documents.lengths - 2
  assert shortest <= lengths.min() and lengths.max() <= longest
  most = 0
  for i in range(len(documents)):
    assert nesting(documents[i]) <= deepest
    counts = [0]
    for word in TASK.vocabulary.decode(documents[i]).split()[1:-1]:
      if word == ']':
        most = max(most, counts.pop())
      else:
        counts[-1] += 1
        if word[0] == '[':
          counts.append(0)
  assert most == args


def test_max_args_and_max_depth_apply_to_other_splits_too():
  task = ListOps(trees=300, max_args=3, max_depth=9, test_trees=5)
  for split in ('train', 'test', 'length_200_300'):
    documents = task.documents(split)
    deepest = max(
      map(nesting, map(documents.__getitem__, range(len(documents))))
    )
    assert deepest <= 8
  assert task.documents('train').lengths.max() <= 100 + 2


def test_baselines_equal_a_slow_form():
  labels = TASK.documents('train').labels
  counts = np.bincount(labels[labels > 0])
  assert len(counts) == 11
  wrong = [
    label != counts.argmax() for label in TASK.documents('lra').labels if label
  ]
  found = TASK.baselines('lra')
  assert found == {'uniform': 0.9, 'likeliest': pytest.approx(np.mean(wrong))}


# Per 10,000 lines of the published file, those with a single operator and 2, 3,
# 4 or 5 digits; and the mean length of all lines.
FLAT = {2: 51, 3: 423, 4: 860, 5: 759}
MEAN_LENGTH = 42.8


def test_statistics_are_those_of_the_published_file():
  """Within 3 standard deviations."""
  whole = ListOps(max_length=10**6)
  splits = [whole.documents(split) for split in ('train', 'validation', 'test')]
  assert [len(each) for each in splits] == [89_000, 1000, 10_000]
  lengths = np.concatenate([each.lengths for each in splits]) - 2
  flat = collections.Counter()
  for each in splits:
    for i in np.flatnonzero(each.lengths - 2 <= 7):
      text = whole.vocabulary.decode(each[i])
      if text.count('[') == 1:
        flat[text.count(' ') - 3] += 1
  for arguments, count in FLAT.items():
    assert abs(flat[arguments] / 10 - count) < 3 * np.sqrt(count)
  spread = lengths.std() / np.sqrt(10_000)
  assert abs(lengths.mean() - MEAN_LENGTH) < 3 * spread
  assert np.mean(lengths <= 100) == pytest.approx(0.894, abs=0.005)


def test_sizes_of_the_published_splits():
  """Their validation has 1,000 expressions of any length."""
  found = {split: len(ListOps().documents(split)) for split in ALIKE}
  assert found == {
    'train': 79_501,
    'validation': 891,
    'test': 10_000,
    'test_short': 8919,
  }
  theirs = len(ListOps(max_length=10**6).documents('validation'))
  assert theirs == 1000


def test_fewer_long_expressions_are_drawn_at_once(monkeypatch):
  counts, grow = [], listops.grow

  def counted(draws, count, *sizes):
    counts.append(count)
    return grow(draws, count, *sizes)

  monkeypatch.setattr(listops, 'grow', counted)
  assert len(ListOps(trees=300, max_args=10).documents('test')) == 30
  assert len(ListOps(trees=300).documents('test')) == 30
  assert max(counts[:-1]) < 3000 and counts[-1] == 2**16


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: ListOps(trees=2), 'got 2. Set listops.ListOps.trees'),
    (lambda: ListOps(max_args=1), 'listops.ListOps.max_args'),
    (
      lambda: ListOps(max_args=10, max_depth=1800),
      '=1800 .* inf words',
    ),
    (lambda: ListOps(max_args=15), 'max_args=15 .* words'),
    (
      lambda: ListOps(trees=400, max_length=1, seed=1).documents('validation'),
      'validation .* 1 words. .* listops.ListOps.trees',
    ),
    (
      lambda: ListOps(max_args=2, max_depth=2).documents('train'),
      '100000 .* listops.ListOps.max_args or',
    ),
    (
      lambda: ListOps(max_depth=4).documents('length_600_700'),
      '601 to 699 words. .* listops.ListOps.max_args',
    ),
  ],
)
def test_invalid_settings_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()
