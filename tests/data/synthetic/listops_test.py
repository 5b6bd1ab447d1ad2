"""ListOps: against a stack machine, rejection, published figures."""

import collections
import dataclasses
import statistics

import numpy as np
import pytest

from meliad_rec.data.synthetic import listops
from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.synthetic.listops import ListOps
from meliad_rec.data.synthetic.listops import LRAListOps
from meliad_rec.data.synthetic.listops_trees import grow
from meliad_rec.data.synthetic.listops_trees import Lengths
from meliad_rec.data.synthetic.listops_trees import Level
from meliad_rec.data.synthetic.listops_trees import mean_length
from meliad_rec.data.synthetic.listops_trees import VOCABULARY
from meliad_rec.data.synthetic.listops_trees import write
from tests.data.synthetic.spelled import spelled

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


OPENS = np.isin(
  np.arange(VOCABULARY.size), VOCABULARY.encode(' '.join(EVALUATE))
)
CLOSES = np.arange(VOCABULARY.size) == VOCABULARY.encode(']')


def nesting(tokens):
  """The maximum number of operators around a digit of an expression."""
  depth = np.cumsum(OPENS[tokens].astype(int) - CLOSES[tokens])
  return int(depth.max(initial=0))


def texts(levels):
  """Yields the ids and the value of each expression."""
  tokens, starts, values_N = write(levels)
  assert starts[0] == 0 and starts[-1] == len(tokens)
  assert len(values_N) == len(starts) - 1
  for begin, end, value in zip(starts, starts[1:], values_N, strict=False):
    yield tokens[begin:end], value


@pytest.mark.parametrize(('args', 'depth'), [(5, 20), (9, 3)])
def test_values_are_those_of_a_stack_machine(args, depth):
  seen = collections.Counter()
  for ids, value in texts(grow(Draws(0), 3000, args, depth)):
    words = VOCABULARY.decode(ids).split()
    assert run(words) == (value, nesting(ids))
    assert nesting(ids) < depth
    seen.update(words)
  assert set(seen) == {*EVALUATE, ']', *'0123456789'}


def test_levels_are_in_the_order_of_their_parents():
  ids = lambda text: VOCABULARY.encode(text)
  levels = [
    Level(ids('[SM 4 [MAX'), np.array([3, 0, 2])),
    Level(ids('1 [MIN 2 8 9'), np.array([0, 2, 0, 0, 0])),
    Level(ids('6 5'), np.array([0, 0])),
  ]
  found = [(VOCABULARY.decode(ids), value) for ids, value in texts(levels)]
  assert found == [('[SM 1 [MIN 6 5 ] 2 ]', 8), ('4', 4), ('[MAX 8 9 ]', 9)]
  assert nesting(ids('START [SM 1 [MIN 6 5 ] 2 ] END')) == 2


@pytest.mark.parametrize(('args', 'depth'), [(5, 20), (8, 6)])
def test_the_mean_length_is_right(args, depth):
  found = np.diff(write(grow(Draws(0), 50_000, args, depth)).starts)
  error = 5 * found.std() / np.sqrt(len(found))
  assert abs(found.mean() - mean_length(args, depth)) <= error


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


TASK = ListOps(trees=2000, max_length=30, test_trees=40)
ALIKE = 'train', 'validation', 'test', 'test_short'
LENGTHS = [f'length_{n}_{n + 100}' for n in range(200, 1000, 100)]
# Arguments, nesting, and words of the shortest and longest expression.
TESTS = {
  'args_5': (5, 8, 100, 1000),
  'args_10': (10, 8, 100, 1000),
  'args_15': (15, 8, 100, 1000),
  'lra': (10, 9, 501, 1999),
}


@pytest.mark.parametrize('split', TASK.splits)
def test_the_label_of_the_last_token_is_the_value(split):
  for (start, *words, end), labels in spelled(TASK, split):
    assert (start, end) == ('START', 'END')
    assert labels == [None] * (len(words) + 1) + [str(run(words)[0])]


@pytest.mark.parametrize('split', ['validation', 'args_5'])
def test_documents_without_ends_are_otherwise_the_same(split):
  """As for TLB and GUTLB in the code of the dynamic-halt paper."""
  bare = dataclasses.replace(TASK, ends=False)
  assert bare.vocabulary.words == TASK.vocabulary.words[:-2]
  assert bare.baselines(split) == TASK.baselines(split)
  both = zip(spelled(bare, split), spelled(TASK, split), strict=True)
  for (words, labels), (in_ends, of_end) in both:
    assert words == in_ends[1:-1]
    assert labels == of_end[2:]


def test_counts():
  assert TASK.splits == (*ALIKE, *LENGTHS, *TESTS)
  whole = dataclasses.replace(TASK, max_length=10**6, test_trees=1)
  words = {split: [w for w, _ in spelled(whole, split)] for split in ALIKE}
  assert [*map(len, words.values())] == [1780, 20, 200, 200]
  for split in ALIKE:
    fitting = [
      each for each in words[split] if split == 'test' or len(each) <= 32
    ]
    assert [w for w, _ in spelled(TASK, split)] == fitting
  assert max(map(len, words['test'])) > 32
  other = dataclasses.replace(TASK, validation_like_train=False)
  validation = [w for w, _ in spelled(other, 'validation')]
  assert validation == words['validation'] and max(map(len, validation)) > 32
  assert [*spelled(other, 'train')] == [*spelled(TASK, 'train')]
  for split in (*LENGTHS, *TESTS):
    assert len(TASK.documents(split)) == 40


@pytest.mark.parametrize('split', LENGTHS)
def test_lengths_are_between_the_bounds(split):
  _, a, b = split.split('_')
  lengths = TASK.documents(split).lengths - 2
  assert int(a) < lengths.min() and lengths.max() < int(b)
  assert np.ptp(lengths) > 50


@pytest.mark.parametrize('split', TESTS)
def test_arguments_and_depth(split):
  args, deepest, shortest, longest = TESTS[split]
  most = 0
  for words, _ in spelled(TASK, split):
    assert shortest <= len(words) - 2 <= longest
    assert run(words[1:-1])[1] <= deepest
    counts = [0]
    for word in words[1:-1]:
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
    for words, _ in spelled(task, split):
      assert run(words[1:-1])[1] <= 8
      assert split != 'train' or len(words) <= 100 + 2


def test_baselines_equal_a_slow_form():
  values = {
    split: [labels[-1] for _, labels in spelled(TASK, split)]
    for split in ('train', 'lra')
  }
  likeliest = statistics.mode(values['train'])
  wrong = np.mean([value != likeliest for value in values['lra']])
  found = TASK.baselines('lra')
  assert found == {'uniform': 0.9, 'likeliest': pytest.approx(wrong)}


# Per 10,000 lines of the published file, those with a single operator and 2, 3,
# 4 or 5 digits; and the mean length of all lines.
FLAT = {2: 51, 3: 423, 4: 860, 5: 759}
MEAN_LENGTH = 42.8
# Expressions, and those of at most 100 words.
SIZES = {'train': (89_000, 79_501), 'validation': (1000, 891)}
SIZES |= {'test': (10_000, 8919)}


def test_statistics_are_those_of_the_published_file():
  """Within 3 standard deviations."""
  whole = ListOps(max_length=10**6)
  lengths, flat = [], collections.Counter()
  for split, sizes in SIZES.items():
    each = whole.documents(split)
    lengths.append(each.lengths - 2)
    assert (len(each), (lengths[-1] <= 100).sum()) == sizes
    for i in np.flatnonzero(lengths[-1] <= 7):
      text = whole.vocabulary.decode(each[i])
      if text.count('[') == 1:
        flat[text.count(' ') - 3] += 1
  for arguments, count in FLAT.items():
    assert abs(flat[arguments] / 10 - count) < 3 * np.sqrt(count)
  lengths = np.concatenate(lengths)
  spread = lengths.std() / np.sqrt(10_000)
  assert abs(lengths.mean() - MEAN_LENGTH) < 3 * spread
  assert np.mean(lengths <= 100) == pytest.approx(0.894, abs=0.005)


def test_fewer_long_expressions_are_drawn_at_once(monkeypatch):
  counts, grow = [], listops.grow

  def counted(draws, count, *sizes):
    counts.append(count)
    return grow(draws, 100, *sizes)

  monkeypatch.setattr(listops, 'grow', counted)
  assert len(ListOps(trees=30, max_args=10).documents('test')) == 3
  assert len(ListOps(trees=30).documents('test')) == 3
  assert max(counts[:-1]) < 3000 and counts[-1] == 2**16


def test_expressions_of_the_long_range_arena():
  task = LRAListOps(
    expressions=120, test_expressions=30, min_length=60, max_length=90
  )
  seen, counts = set(), []
  for split in task.splits:
    documents = [*spelled(task, split)]
    counts.append(len(documents))
    for words, labels in documents:
      assert (words[0], words[-1]) == ('START', 'END')
      assert 60 <= len(words) - 2 <= 90
      value, depth = run(words[1:-1])
      assert labels == [*[None] * (len(words) - 1), str(value)]
      assert depth < 10
      seen.add(' '.join(words))
  assert counts == [120, 30, 30] and len(seen) == 180
  assert LRAListOps(ends=False).vocabulary.size == task.vocabulary.size - 2


def test_lengths_and_answers_of_the_long_range_arena():
  """The commonest answers, 0 and 9, are 17.5 % of its examples each."""
  documents = LRAListOps(100, 1500).documents('validation')
  assert documents.lengths.min() >= 503 and documents.lengths.max() <= 2001
  share = np.bincount(documents.labels)[1:] / len(documents)
  assert np.ptp([*share[[0, 9]], 0.175]) < 0.04
  assert share[1:9].max() < 0.11


@pytest.mark.parametrize(
  ('setting', 'told'),
  [
    ({'max_length': 400}, 'max_length must be at least 501, got 400'),
    ({'max_args': 2, 'max_depth': 3}, 'No expression with max_args=2'),
    ({'expressions': 0}, 'Set listops.LRAListOps.expressions'),
  ],
)
def test_lengths_and_counts_out_of_range_are_refused(setting, told):
  with pytest.raises(ValueError, match=told):
    LRAListOps(**setting).documents('train')
