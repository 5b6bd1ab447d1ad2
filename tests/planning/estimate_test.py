"""Times of exchanges and steps, compared with values by hand."""

from collections import Counter
import types

import numpy as np
import pytest

from meliad_rec.planning import estimate
from meliad_rec.planning import hlo
from meliad_rec.planning import topology

V5E = topology.CHIPS['v5e']


def devices(*coords):
  return [types.SimpleNamespace(coords=c) for c in coords]


def row(count):
  return devices(*((i, 0, 0) for i in range(count)))


def test_an_all_reduce_sends_everything_nearly_twice():
  """Along a line of 4 one link is used each way; along a ring of 16 two."""
  where = topology.parse('v5e:16x16')
  size = 90 * 10**9
  of = lambda op, count: estimate.exchange_seconds(op, size, row(count), where)
  assert of('all-reduce', 4) == pytest.approx(2 * 2 * 3 / 4)
  assert of('all-gather', 4) == pytest.approx(2 * 3 / 4)
  assert of('all-gather', 16) == pytest.approx(15 / 16)
  assert of('collective-permute', 2) == pytest.approx(2)
  assert of('all-reduce', 1) == 0


def test_a_square_has_links_along_both_sides():
  where = topology.parse('v5e:4x4')
  square = devices((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0))
  found = estimate.exchange_seconds('all-gather', 90 * 10**9, square, where)
  assert found == pytest.approx(3 / 4)


@pytest.mark.parametrize(
  'count, expected', [(2, 0.5), (3, 2 / 3), (4, 1.0), (8, 2.0), (16, 2.0)]
)
def test_an_all_to_all_crosses_the_middle(count, expected):
  """Half of the devices send half of their data over one or two links."""
  where = topology.parse('v5e:16x16')
  for op in 'all-to-all', 'ragged-all-to-all':
    found = estimate.exchange_seconds(op, V5E.link, row(count), where)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize('name, count', [('v5e:16x16', 16), ('v5e:8x8', 8)])
def test_an_all_to_all_is_as_slow_as_its_busiest_link(name, count):
  """Counts each message on each link, along the shorter way in a ring."""
  where = topology.parse(name)
  carried = Counter()
  for start in range(count):
    for end in range(count):
      step, hops = (1, end - start) if end > start else (-1, start - end)
      if where.shape[0] == 16 and 2 * hops > count:
        step, hops = -step, count - hops
      # Messages to the opposite device take both ways equally.
      halves = (1, -1) if 2 * hops == count == 16 else (step,)
      for way in halves:
        for i in range(hops):
          link = (start + way * i) % count, way
          carried[link] += V5E.link / count / len(halves)
  found = estimate.exchange_seconds('all-to-all', V5E.link, row(count), where)
  assert found == pytest.approx(max(carried.values()) / V5E.link)


def test_an_all_to_all_of_a_square_is_no_slower_than_along_its_longer_side():
  where = topology.parse('v5e:8x8')
  along = [(i, j, 0) for i in range(4) for j in range(2)]
  found = estimate.exchange_seconds(
    'all-to-all', V5E.link, devices(*along), where
  )
  assert found == pytest.approx(1.0)


def test_halves_of_a_chip_share_its_links():
  where = topology.parse('v7x:4x2x1')
  one = row(4)
  both = one + one
  of = lambda op, members: estimate.exchange_seconds(
    op, where.chip.link, members, where
  )
  # One half of each chip takes part; the other halves do the same.
  assert of('all-gather', one) == pytest.approx(2 * 3 / 4)
  assert of('collective-permute', one[:2]) == pytest.approx(2)
  assert of('all-to-all', one) == pytest.approx(2)
  # A chip receives once what both need, and sends what both have.
  assert of('all-gather', both) == pytest.approx(7 / 8)
  assert of('all-to-all', both) == pytest.approx(2)


def test_the_smallest_exchange_takes_a_time_per_hop():
  where = topology.parse('v5e:4x4')
  found = estimate.exchange_seconds('all-reduce', 4, row(4), where)
  assert found == pytest.approx(3 * estimate.HOP)


def test_halves_of_a_chip_exchange_too():
  where = topology.parse('v7x:2x2x1')
  found = estimate.exchange_seconds(
    'all-reduce', 90 * 10**9, devices((0, 0, 0), (0, 0, 0)), where
  )
  assert found == pytest.approx(1)


@pytest.mark.parametrize(
  'name, size, ring',
  [
    ('v5e:16x16', 16, True),
    ('v5e:8x16', 8, False),
    ('v5p:4x4x8', 4, True),
    ('v5p:2x4x4', 4, False),
  ],
)
def test_rings(name, size, ring):
  assert estimate.wraps(topology.parse(name), size) is ring


def mesh():
  found = np.empty((2, 1, 2), object)
  found.flat = devices((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0))
  shape = {'data': 2, 'fsdp': 1, 'model': 2}
  return types.SimpleNamespace(devices=found, shape=shape)


def collective(op, groups, size):
  return hlo.Collective(op, size, f'%a = {op}(%b), replica_groups={groups}, x')


def test_exchanges_of_one_kind_are_one_line():
  program = hlo.Program(
    collectives=Counter(
      {
        collective('all-reduce', '{{0,1},{2,3}}', 100): 3,
        collective('all-reduce', '[2,2]<=[4]', 10): 2,
        collective('reduce-scatter', '{{0,2},{1,3}}', 50 * 2**20): 1,
      }
    )
  )
  where = topology.parse('v5e:2x2')
  scatter, reduce = estimate.exchanges(program, mesh(), where)
  assert (reduce.op, reduce.axes) == ('all-reduce', 'model')
  assert (reduce.count, reduce.size) == (5, 320)
  # Its input is twice its output.
  assert (scatter.axes, scatter.size) == ('data', 100 * 2**20)
  assert scatter.seconds == pytest.approx(50 * 2**20 / V5E.link)


def test_seconds_of_a_step():
  program = hlo.Program(
    cycles=3 * 10**9,
    kernels=Counter(
      {
        hlo.Kernel('products', 197 * 10**12, 8): 2,
        hlo.Kernel('copies', 1, 819 * 10**9): 1,
        hlo.Kernel('silent', None, None): 9,
      }
    ),
  )
  exchange = estimate.Exchange('all-reduce', 'data', 1, 1, 0.25)
  found = estimate.seconds(program, [exchange], V5E)
  assert (found.compute, found.kernels, found.exchange) == (2, 3, 0.25)
  assert (found.most, found.least) == (5.25, 5)
