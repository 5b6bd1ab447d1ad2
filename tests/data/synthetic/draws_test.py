"""Numbers that stay as they are, each as likely; rows that are different."""

import itertools

import numpy as np
import pytest

from meliad_rec.data.synthetic.labelled import distinct
from meliad_rec.data.synthetic.labelled import Draws


def test_numbers_are_these_on_every_machine():
  """Golden, from NumPy 2.4: others would change all data."""
  draws = Draws(3)
  assert draws.below(100, 6).tolist() == GOLDEN
  assert draws.below(100, 6).tolist() != GOLDEN
  assert Draws(4).below(100, 6).tolist() != GOLDEN


GOLDEN = [80, 61, 38, 84, 46, 87]


def test_each_stream_has_its_own():
  of = lambda *stream: Draws(3, *stream).below(100, 6).tolist()
  assert of() == GOLDEN
  made = [GOLDEN, of(0), of(1), of(1, 0)]
  assert len({*map(tuple, made)}) == 4
  assert of(0) == STREAM


STREAM = [59, 11, 86, 30, 0, 73]


def test_bits_are_these_and_even():
  assert Draws(3).bits(3).tolist() == BITS
  bits = np.unpackbits(Draws(0).bits(10_001).view(np.uint8))
  assert bits.size == 32 * 10_001
  assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(bits.size)


BITS = [3485385464, 367860371, 770692085]


def test_between_0_and_1():
  drawn = Draws(0).between_0_and_1(50_001)
  assert drawn.shape == (50_001,)
  assert 0 < drawn.min() < 1e-3 and 1 - 1e-3 < drawn.max() < 1
  counts = np.histogram(drawn, 10, (0, 1))[0]
  assert np.abs(counts - 5000).max() < 5 * np.sqrt(5000)


@pytest.mark.parametrize('bits', [0, 2**32 - 1])
def test_the_first_and_the_last_are_neither_0_nor_1(bits, monkeypatch):
  monkeypatch.setattr(Draws, 'bits', lambda _, n: np.full(n, bits, np.uint32))
  assert 0 < Draws(0).between_0_and_1(1)[0] < 1


def test_a_seed_is_no_less_than_0():
  with pytest.raises(ValueError, match='^The seed of .* is -1; set it to 0'):
    Draws(-1)


def test_orders_are_all_as_likely():
  draws = Draws(0)
  orders = [tuple(draws.order(3).tolist()) for _ in range(6000)]
  counts = [orders.count(one) for one in itertools.permutations(range(3))]
  assert sum(counts) == 6000
  assert max(counts) - min(counts) < 10 * np.sqrt(1000)


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


def test_rows_that_are_taken_are_left_out():
  draw = lambda: Draws(0).below(5, 40)[:, None]
  every = distinct(lambda count: draw(), 5, 'x').tolist()
  taken = {np.array(row).tobytes() for row in every[1:3]}
  found = distinct(lambda count: draw(), 3, 'x', taken).tolist()
  assert found == [every[0], *every[3:]]


def test_more_than_there_are():
  draws = Draws(0)
  with pytest.raises(ValueError, match=r'^5 different .* 100 tries .* Set x\.'):
    distinct(lambda count: draws.below(3, count)[:, None], 5, 'x')
