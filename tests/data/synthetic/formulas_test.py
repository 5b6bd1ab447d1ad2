"""Formulas against a person who reads them, and against a slow generator."""

import collections
import itertools
import random

import numpy as np
import pytest

from meliad_rec.data.synthetic import logical_inference
from meliad_rec.data.synthetic.labelled import Draws
from meliad_rec.data.synthetic.logical_inference import AND
from meliad_rec.data.synthetic.logical_inference import NOT
from meliad_rec.data.synthetic.logical_inference import OR
from meliad_rec.data.synthetic.logical_inference import SYMBOLS
from meliad_rec.data.vocabulary import Words

WORDS = Words([*'xyz', *SYMBOLS])
WORLDS = [
  {name: bool(world >> v & 1) for v, name in enumerate('abcdef')}
  for world in range(64)
]


def texts(made_PN):
  """The words of each formula."""
  ids_NX = logical_inference.write(made_PN, WORDS.encode(' '.join(SYMBOLS)))
  assert ids_NX.shape[1] == logical_inference.LONGEST
  for ids_X in ids_NX:
    length = np.count_nonzero(ids_X)
    assert ids_X[:length].all()
    yield WORDS.decode(ids_X[:length])


def parse(text):
  """Nested tuples of words between brackets."""
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
  """Whether it does in a world."""
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


def test_they_hold_where_their_words_say(drawn):
  made_PN = drawn.reshape(logical_inference.PLACES, -1)
  found_N = logical_inference.worlds(drawn).ravel().tolist()
  for text, found in zip(texts(made_PN), found_N, strict=True):
    formula = parse(text)
    expected = [holds(formula, world) for world in WORLDS]
    assert [bool(found >> w & 1) for w in range(64)] == expected


def test_operators_are_counted(drawn):
  found_N = logical_inference.operators(drawn).ravel()
  for text, found in zip(
    texts(drawn.reshape(logical_inference.PLACES, -1)), found_N, strict=True
  ):
    words = text.split()
    assert found == sum(words.count(word) for word in ('and', 'or', 'not'))


def column(places):
  made_P1 = np.zeros((logical_inference.PLACES, 1), np.uint8)
  for place, what in places.items():
    made_P1[place] = what
  return made_P1


@pytest.mark.parametrize(
  ('places', 'text'),
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
def test_words_by_hand(places, text):
  made_P1 = column(places)
  assert [*texts(made_P1)] == [text]
  by_hand = sum(
    holds(parse(text), world) << number for number, world in enumerate(WORLDS)
  )
  assert logical_inference.worlds(made_P1).tolist() == [by_hand]


def test_the_longest_one():
  inner = dict.fromkeys(range(7), AND + NOT)
  made_P1 = column(inner | dict.fromkeys(range(7, 15), 1 + NOT))
  (text,) = texts(made_P1)
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
  """A formula as the published generator draws it."""
  operator = rng.choice(['and', 'or', 'and', 'or', *[None] * 5])
  if operator is None or longest < 2:
    made = rng.choice(variables)
  else:
    left, right = (slow(rng, variables, longest // 2) for _ in range(2))
    made = f'( {left} ( {operator} {right} ) )'
  return f'( not {made} )' if rng.randrange(3) == 0 else made


def test_formulas_come_as_often_as_from_the_slow_form():
  """By length and operators, and short ones themselves, within 5 standard
  deviations."""
  rng, count = random.Random(0), 8000
  made_PN = logical_inference.draw(Draws(1), count)[:, 0]
  others = (slow(rng, rng.sample('abcdef', k=4)) for _ in range(count))
  tallies = [collections.Counter(), collections.Counter()]
  for tally, some in zip(tallies, (texts(made_PN), others), strict=True):
    for text in some:
      words = text.split()
      for operator in ('and', 'or', 'not'):
        tally[operator, words.count(operator)] += 1
      tally[len(words)] += 1
      tally[text if len(words) < 8 else 'long'] += 1
  for each in tallies[0] | tallies[1]:
    a, b = (tally[each] for tally in tallies)
    assert abs(a - b) < 5 * np.sqrt(a + b + 1), each
