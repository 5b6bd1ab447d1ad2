"""Which scores count; checkpoints_test.py keeps steps by them."""

import math

import pytest

from meliad_rec.storage.checkpoints import Best
from meliad_rec.storage.checkpoints import comparable


@pytest.mark.parametrize('best_is, value', [('lowest', 2.0), ('highest', -2.0)])
def test_lower_scores_are_better(best_is, value):
  assert Best('loss', best_is).score({'loss': 2.0, 'x': 1.0}) == ['loss', value]


def test_no_score():
  assert Best('loss', 'lowest').score(None) is None
  assert Best('loss', 'lowest').score({'loss': math.nan}) is None
  assert Best(None, 'lowest').score({'loss': 2.0}) is None


def test_only_what_was_judged_as_the_newest_counts():
  scores = {1: (0.5, 'v'), 2: (2.0, 'w'), 3: None, 4: (3.0, 'w'), 5: None}
  assert comparable(scores) == {1: None, 2: 2.0, 3: None, 4: 3.0, 5: None}
  assert comparable({1: None}) == {1: None}
