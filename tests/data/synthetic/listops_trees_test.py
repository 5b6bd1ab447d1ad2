"""Expressions against a stack machine, and against a slow generator."""

import collections
import random
import statistics

import numpy as np
import pytest

from meliad_rec.data.synthetic import listops
from meliad_rec.data.synthetic.labelled import Draws
from meliad_rec.data.synthetic.listops import grow
from meliad_rec.data.synthetic.listops import Level
from meliad_rec.data.synthetic.listops import mean_length
from meliad_rec.data.synthetic.listops import nesting
from meliad_rec.data.synthetic.listops import VOCABULARY
from meliad_rec.data.synthetic.listops import write

GIVES = {
  '[MIN': min,
  '[MAX': max,
  '[MED': lambda values: int(statistics.median(values)),
  '[SM': lambda values: sum(values) % 10,
}


def run(words):
  """What an expression comes to, and the most that were open at a time."""
  stack, deepest = [[]], 0
  for word in words:
    if word in GIVES:
      stack.append([word])
    elif word == ']':
      operator, *values = stack.pop()
      assert len(values) > 1
      stack[-1].append(GIVES[operator](values))
    else:
      stack[-1].append(int(word))
    deepest = max(deepest, len(stack) - 1)
  ((value,),) = stack
  return value, deepest


def texts(levels):
  """Ids and value of each expression."""
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
  assert set(seen) == {*GIVES, ']', *'0123456789'}


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
def test_by_hand(text, value, deep):
  assert run(text.split()) == (value, deep)
  assert nesting(VOCABULARY.encode(text)) == deep
  assert nesting(VOCABULARY.encode(f'START {text} END')) == deep


def test_levels_lie_in_the_order_of_their_parents():
  ids = lambda text: VOCABULARY.encode(text)
  levels = [
    Level(ids('[SM 4 [MAX'), np.array([3, 0, 2])),
    Level(ids('1 [MIN 2 8 9'), np.array([0, 2, 0, 0, 0])),
    Level(ids('6 5'), np.array([0, 0])),
  ]
  found = [(VOCABULARY.decode(ids), value) for ids, value in texts(levels)]
  assert found == [('[SM 1 [MIN 6 5 ] 2 ]', 8), ('4', 4), ('[MAX 8 9 ]', 9)]


def slow(rng, args, max_depth, depth=1):
  """An expression as the published generator draws it."""
  if depth == max_depth or rng.random() > 0.25:
    return [str(rng.randint(0, 9))]
  inner = [
    slow(rng, args, max_depth, depth + 1) for _ in range(rng.randint(2, args))
  ]
  return [rng.choice([*GIVES]), *sum(inner, []), ']']


@pytest.mark.parametrize(('args', 'depth'), [(4, 5), (2, 20)])
def test_expressions_come_as_often_as_from_the_slow_form(args, depth):
  """By length, nesting and each word, within 5 standard deviations."""
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
def test_the_mean_length_is_that_of_many(args, depth):
  found = np.diff(write(grow(Draws(0), 50_000, args, depth)).starts)
  error = 5 * found.std() / np.sqrt(len(found))
  assert abs(found.mean() - mean_length(args, depth)) <= error


def test_different_ones_in_the_order_drawn():
  draws, kept = Draws(2), []

  def grow_some():
    kept.append(grow(draws, 40, 3, 3))
    return kept[-1]

  taken = {bytes([4])}
  found = listops.distinct(grow_some, 25, 'x', taken)
  drawn = [(ids.tobytes(), v) for levels in kept for ids, v in texts(levels)]
  expected = dict(one for one in drawn if one[0] not in taken)
  assert [*found.items()] == [*expected.items()][:25]
  assert len(kept) > 1


def test_more_than_there_are():
  draws = Draws(0)
  with pytest.raises(
    ValueError, match=r'^99 different .* hardly more than 10\. Set x higher'
  ):
    listops.distinct(lambda: grow(draws, 500, 2, 1), 99, 'x')
