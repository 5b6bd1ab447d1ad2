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
  # A square has links along both sides.
  square = devices((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0))
  found = estimate.exchange_seconds('all-gather', size, square, where)
  assert found == pytest.approx(3 / 4)
  # The smallest takes a time for each hop.
  found = estimate.exchange_seconds('all-reduce', 4, row(4), where)
  assert found == pytest.approx(3 * estimate.HOP)


@pytest.mark.parametrize('count', [2, 3, 4, 8, 16])
def test_an_all_to_all_is_as_slow_as_its_busiest_link(count):
  """Counts each message on each link, along the shorter way in a ring of 16."""
  where, carried = topology.parse('v5e:16x16'), Counter()
  for start in range(count):
    for end in range(count):
      step, hops = (1, end - start) if end > start else (-1, start - end)
      if count == 16 and 2 * hops > count:
        step, hops = -step, count - hops
      # Messages to the opposite device take both ways equally.
      halves = (1, -1) if 2 * hops == count == 16 else (step,)
      for way in halves:
        for i in range(hops):
          link = (start + way * i) % count, way
          carried[link] += V5E.link / count / len(halves)
  for op in 'all-to-all', 'ragged-all-to-all':
    found = estimate.exchange_seconds(op, V5E.link, row(count), where)
    assert found == pytest.approx(max(carried.values()) / V5E.link)


def test_an_all_to_all_of_a_square_is_no_slower_than_along_its_longer_side():
  where = topology.parse('v5e:8x8')
  along = devices(*((i, j, 0) for i in range(4) for j in range(2)))
  found = estimate.exchange_seconds('all-to-all', V5E.link, along, where)
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
  # Both halves of one chip exchange too.
  assert of('all-reduce', one[:1] * 2) == pytest.approx(1)


def test_rings():
  for name, size, ring in (
    ('v5e:16x16', 16, True),
    ('v5e:8x16', 8, False),
    ('v5p:4x4x8', 4, True),
    ('v5p:2x4x4', 4, False),
  ):
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
    work=Counter({hlo.Label('products', 'step'): 3 * 10**9}),
    kernels=Counter(
      {
        hlo.Kernel('products', 197 * 10**12, 8): 2,
        hlo.Kernel('copies', 1, 819 * 10**9): 1,
        hlo.Kernel('silent', None, None): 9,
      }
    ),
  )
  exchange = estimate.Exchange('all-reduce', 'data', 1, 1, 0.25)
  shares = estimate.time_shares(program, [exchange], V5E)
  found = estimate.seconds(shares)
  assert (found.compute, found.kernels, found.exchange) == (2, 3, 0.25)
  assert (found.upper, found.lower) == (5.25, 5)
