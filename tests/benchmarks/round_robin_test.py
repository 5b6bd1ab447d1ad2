"""Timing in turns."""

import pytest

from meliad_rec.benchmarks.round_robin import round_robin
from meliad_rec.benchmarks.round_robin import Times


def test_calls_take_turns_after_one_call_each():
  order = []
  calls = {name: lambda name=name: order.append(name) for name in 'abc'}
  times = round_robin(calls, rounds=2)
  assert ''.join(order) == 'abc' * 3
  assert all(len(t.wall) == len(t.cpu) == 2 for t in times.values())


def test_no_rounds_is_an_error():
  with pytest.raises(ValueError, match='0 rounds time nothing; set --rounds'):
    round_robin({'a': lambda: None}, 0)


def test_load_that_slows_whole_rounds_drops_out_of_the_ratio():
  slow, fast = Times([2.0, 20.0, 2.2], []), Times([1.0, 10.0, 1.1], [])
  assert slow.ratio(fast) == pytest.approx(2)
  assert slow.median == 2.2


def test_spread_is_the_distance_of_the_quartiles():
  assert Times([1.0, 2.0, 3.0, 4.0, 5.0], []).spread == pytest.approx(2 / 3)
  assert Times([1.0], []).spread == 0
