"""Lengths are as likely as they are, and what has one is as likely too."""

import collections
import itertools

import numpy as np
import pytest

from meliad_rec.data.synthetic.labelled import Draws
from meliad_rec.data.synthetic.listops import grow
from meliad_rec.data.synthetic.listops import Lengths
from meliad_rec.data.synthetic.listops import nesting
from meliad_rec.data.synthetic.listops import write


def by_hand(args, max_depth, depth=1):
  """Shares of all lengths, by every way to make an expression."""
  shares = collections.Counter({1: 1.0 if depth == max_depth else 0.75})
  if depth < max_depth:
    inner = by_hand(args, max_depth, depth + 1)
    for k in range(2, args + 1):
      for lengths in itertools.product(inner, repeat=k):
        share = np.prod([inner[n] for n in lengths])
        shares[2 + sum(lengths)] += 0.25 / (args - 1) * share
  return shares


@pytest.mark.parametrize(('args', 'depth'), [(3, 3), (2, 4), (4, 2), (5, 1)])
def test_shares_are_those_of_all_ways(args, depth):
  lengths = Lengths(args, depth, 60)
  expected = by_hand(args, depth)
  for n in range(1, 61):
    assert lengths.share(n, n) == pytest.approx(expected[n])
  assert lengths.share(1, 60) == pytest.approx(1)


# Measured by drawing expressions, in another program.
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
def test_shares_are_those_that_were_measured(bounds):
  args, depth, shortest, longest = bounds
  found = Lengths(args, depth, longest).share(shortest, longest)
  assert found == pytest.approx(ACCEPTED[bounds], rel=0.05)


def facts(levels, shortest, longest):
  """Of each expression of such a length: it, nesting, arguments, two words."""
  tokens, starts, _ = write(levels)
  for begin, end, arguments in zip(
    starts, starts[1:], levels[0].arguments_N, strict=False
  ):
    ids = tokens[begin:end]
    if shortest <= len(ids) <= longest:
      # The last argument may be a digit, or end as an operator does.
      yield len(ids), nesting(ids), int(arguments), int(ids[0]), int(ids[-2])


@pytest.mark.parametrize(('args', 'depth'), [(5, 20), (3, 4)])
def test_expressions_are_as_likely_as_those_drawn_until_they_fit(args, depth):
  """Each fact within 5 standard deviations."""
  drawn = [*facts(grow(Draws(0), 100_000, args, depth), 14, 17)]
  made = Lengths(args, depth, 30).grow(Draws(1), len(drawn), 14, 17)
  made = [*facts(made, 14, 17)]
  assert len(made) == len(drawn) > 1000
  tallies = [collections.Counter(), collections.Counter()]
  for tally, some in zip(tallies, (drawn, made), strict=True):
    for fact in some:
      tally.update(enumerate(fact))
      tally[fact[:3]] += 1
  for each in tallies[0] | tallies[1]:
    a, b = (tally[each] for tally in tallies)
    assert abs(a - b) < 5 * np.sqrt(a + b + 1), each


def test_long_ones_have_the_length_asked_for():
  levels = Lengths(5, 20, 700).grow(Draws(0), 50, 690, 700)
  lengths = np.diff(write(levels).starts)
  assert lengths.min() >= 690 and lengths.max() <= 700
  assert len(set(lengths.tolist())) > 8
  assert len(levels) <= 20
