"""Numbers that stay as they are, each as likely; rows that are different."""

import numpy as np
import pytest

from meliad_rec.data.generated.draws import distinct
from meliad_rec.data.generated.draws import Draws


def test_numbers_are_these_on_every_machine():
  """Golden, from NumPy 2.4: others would change all data."""
  draws = Draws(3)
  assert draws.below(100, 6).tolist() == GOLDEN
  assert draws.below(100, 6).tolist() != GOLDEN
  assert Draws(4).below(100, 6).tolist() != GOLDEN


GOLDEN = [80, 61, 38, 84, 46, 87]


def test_each_number_is_as_likely():
  counts = np.bincount(Draws(0).below(7, 70_000))
  assert len(counts) == 7
  assert np.abs(counts - 10_000).max() < 5 * np.sqrt(10_000)


def test_each_has_its_own_end():
  ends = np.array([1, 2, 5, 1000] * 50)
  drawn = Draws(1).below(ends, 200)
  assert (drawn < ends).all() and (drawn >= 0).all()
  assert drawn.max() > 500
  assert Draws(1).below(3, 0).tolist() == []


def test_rows_are_different_and_in_their_order():
  seen = []

  def draw(count):
    rows = Draws(len(seen)).below(4, 2 * count).reshape(count, 2)
    seen.append(rows)
    return rows

  rows = distinct(draw, 9, 'x').tolist()
  everything = np.concatenate(seen).tolist()
  expected = []
  for row in everything:
    if row not in expected:
      expected.append(row)
  assert rows == expected[:9]
  assert len(seen) > 1


def test_more_than_there_are():
  draws = Draws(0)
  with pytest.raises(ValueError, match=r'^5 different .* 100 tries .* Set x\.'):
    distinct(lambda count: draws.below(3, count)[:, None], 5, 'x')
