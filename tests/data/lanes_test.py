"""Laws of lanes: every token is a target once, wherever a run stops.

And of prefetching: the same items, their error, and a thread that ends.
"""

import functools
import itertools
import json
import threading
import time

import jax
import numpy as np
import pytest

from meliad_rec.data import lanes as lanes_lib
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.lanes import Lanes
from meliad_rec.data.lanes import ShorterFirst
from meliad_rec.data.pair_batches import PairBatches
from meliad_rec.data.prefetch import prefetch
from meliad_rec.data.vocabulary import Bytes

LENGTHS = [5, 0, 17, 8, 40, 3, 16, 1, 0, 23]
FULL = [0, 2, 3, 4, 5, 6, 7, 9]  # Documents that are not empty.
# Tokens in the two sequences of each pair.
PAIRS = [(5, 2), (17, 20), (1, 1), (8, 8), (3, 30), (16, 1), (9, 12)]
MODES = [
  {'shuffle': shuffle, 'repeat': repeat}
  for shuffle in (True, False)
  for repeat in (True, False)
]


def label_of(ids):
  """Labels, a third of which are 0."""
  return (ids + 7) % 259 * (ids % 3 > 0)


def documents(lengths=LENGTHS, labeled=False):
  rng = np.random.default_rng(0)

  def document(i, length):
    ids = rng.integers(3, 259, length)
    return Document(str(i), ids, length, 1, label_of(ids) if labeled else None)

  return Documents.collect(map(document, range(len(lengths)), lengths), Bytes())


def pairs(lengths=PAIRS):
  """Pairs of sequences; the label of pair i is i + 1."""
  rng = np.random.default_rng(0)

  def document(i, sides):
    ids = rng.integers(3, 259, sum(sides))
    labels = np.array([0] * (len(ids) - 1) + [i + 1])
    return Document(str(i), ids, len(ids), 1, labels, sides[0])

  return Documents.collect(map(document, range(len(lengths)), lengths), Bytes())


def take(lanes, count=None):
  return list(itertools.islice(lanes, count))


def assert_same(items, expected):
  """The same batches and positions."""
  for (batch, position), (other, there) in zip(items, expected, strict=True):
    same = lambda a, b: np.testing.assert_array_equal(a, b, strict=True)
    jax.tree.map(same, batch, other)
    assert position == there


def assert_resumes(make, steps, depth=None):
  """Lanes continue from every position as if they had not stopped."""
  lanes = make()
  begin, whole = lanes.position, take(lanes, steps)
  lanes.seek(begin)
  assert_same(take(lanes, len(whole)), whole)
  for step, position in enumerate([begin, *(after for _, after in whole)]):
    lanes = make()
    lanes.seek(json.loads(json.dumps(position)))
    assert lanes.position == position
    items = prefetch(lanes, depth) if depth else lanes
    assert_same(take(items, len(whole) - step), whole[step:])


def assert_hosts_share(make, parts, steps):
  """Each host reads its rows of the same batches, or its part of more rows."""
  whole = take(make(local_rows=None), steps)
  total = min(len(batch.document_B) for batch, _ in whole)
  for rows in parts:
    expected = []
    for batch, position in whole:
      many = np.arange(len(batch.document_B)).reshape(total, -1)[rows].ravel()
      part = jax.tree.map(lambda a, many=many: a[many], batch)
      expected.append((part, position))
    assert_same(take(make(local_rows=rows), steps), expected)


def targets(batches):
  """Yields (document, offset, input, target) of every real target."""
  for batch in batches:
    for row, column in np.argwhere(batch.mask_BT):
      yield (
        int(batch.document_B[row]),
        int(batch.offset_B[row] + column),
        int(batch.tokens_BT[row, column]),
        int(batch.targets_BT[row, column]),
      )


SIZES = pytest.mark.parametrize('rows, segment', [(3, 8), (20, 4), (2, 64)])


@pytest.mark.parametrize(
  'labeled, shuffle', [(False, True), (False, False), (True, True)]
)
@SIZES
def test_an_epoch_predicts_every_token_once(rows, segment, labeled, shuffle):
  """Or has every label once, at its token."""
  data = documents(labeled=labeled)
  lanes = Lanes(data, rows, segment, seed=1, shuffle=shuffle, repeat=False)
  batches = [batch for batch, _ in lanes]
  expected = []
  for i in range(len(data)):
    tokens = data[i].astype(int)
    shifted = np.append(0, tokens)[:-1]
    pairs = (tokens, label_of(tokens)) if labeled else (shifted, tokens)
    for offset, pair in enumerate(zip(*pairs, strict=True)):
      expected.append((i, offset, *map(int, pair)))
  assert sorted(targets(batches)) == expected
  for batch in batches:
    assert not batch.targets_BT[~batch.mask_BT].any()
    assert not batch.tokens_BT[~batch.mask_BT].any()
    assert batch.tokens_BT.dtype == batch.targets_BT.dtype == np.int32
    scored_BT = batch.mask_BT & ((batch.tokens_BT % 3 > 0) | (not labeled))
    np.testing.assert_array_equal(batch.scored_BT, scored_BT)


@pytest.mark.parametrize('mode', MODES)
def test_rows_continue_and_only_new_documents_start(mode):
  lanes = Lanes(documents(), 3, 8, seed=2, **mode)
  before = [(-1, 0, 0)] * 3
  for batch, _ in take(lanes, 12):
    for row in range(3):
      document, offset = int(batch.document_B[row]), int(batch.offset_B[row])
      last, last_offset, length = before[row]
      continues = last_offset + 8 < length
      assert batch.start_B[row] == (not continues and document >= 0)
      expected = (last, last_offset + 8) if continues else (document, 0)
      assert (document, offset) == expected
      length = LENGTHS[document] if document >= 0 else 0
      before[row] = document, offset, length


def test_the_first_segments_may_be_shorter():
  make = lambda: Lanes(
    documents(), 3, 8, seed=1, repeat=False, shorter_first=ShorterFirst(3, 4)
  )
  batches = [batch for batch, _ in make()]
  lengths = [batch.tokens_BT.shape[1] for batch in batches]
  assert lengths == [3] * 4 + [8] * (len(lengths) - 4)
  read = sorted((i, offset) for i, offset, *_ in targets(batches))
  assert read == [(i, j) for i, n in enumerate(LENGTHS) for j in range(n)]
  assert_resumes(make, None)


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('depth', [None, 3])
def test_lanes_resume_from_every_position(mode, depth):
  make = lambda: Lanes(documents(), 3, 8, seed=4, **mode)
  assert_resumes(make, 20, depth)


@pytest.mark.parametrize('mode', MODES)
def test_hosts_share_the_rows_of_the_same_batches(mode):
  make = lambda **local: Lanes(documents(), 4, 8, seed=6, **mode, **local)
  assert_hosts_share(make, [np.array([0, 3]), np.array([1, 2])], 15)


def test_rows_that_share_a_document_start_at_different_segments():
  """As the papers on enwik8 cut a stream: 40 tokens, 10 segments, 4 rows."""
  data = documents([40])
  batches = [batch for batch, _ in take(Lanes(data, 4, 4, seed=0), 10)]
  offset_NB = np.array([batch.offset_B for batch in batches])
  assert offset_NB[0].tolist() == [0, 8, 20, 28]
  # Each row reads the whole stream, from its offset around to the same place.
  expected_NB = (offset_NB[0] + 4 * np.arange(10)[:, None]) % 40
  np.testing.assert_array_equal(offset_NB, expected_NB)
  start_NB = np.array([batch.start_B for batch in batches])
  assert start_NB[0].all()  # The initial carry belongs to no document.
  np.testing.assert_array_equal(start_NB[1:], offset_NB[1:] == 0)
  np.testing.assert_array_equal(batches[0].tokens_BT[1], data[0][7:11])
  np.testing.assert_array_equal(batches[0].targets_BT[1], data[0][8:12])


@pytest.mark.parametrize('first', [None, ShorterFirst(2, 3)])
def test_rows_that_share_documents_resume_on_all_hosts(first):
  make = lambda **local: Lanes(
    documents([40, 0, 17]), 7, 4, seed=3, shorter_first=first, **local
  )
  batch, _ = next(make())
  assert len({*zip(batch.document_B, batch.offset_B, strict=True)}) == 7
  assert_resumes(make, 15)
  assert_hosts_share(make, [np.array([1, 4, 6])], 15)


@pytest.mark.parametrize(
  'make, rows, options',
  [
    (documents, 8, {}),  # As many rows as documents that are not empty.
    (documents, 20, {'repeat': False}),
    (lambda: documents([40, 17], labeled=True), 7, {}),
    (pairs, 20, {}),
  ],
)
def test_other_documents_are_read_from_the_beginning(make, rows, options):
  batch, _ = next(Lanes(make(), rows, 4, seed=1, **options))
  assert not batch.offset_B.any()


def order(lanes, count):
  """Documents in the order in which one row reads them."""
  started = (int(b.document_B[0]) for b, _ in lanes if b.start_B[0])
  return list(itertools.islice(started, count))


def test_each_epoch_reads_every_document_once_in_its_own_order():
  lanes = Lanes(documents(), 1, 8, seed=7)
  read = order(lanes, 3 * len(FULL))
  assert lanes.position['epoch'] == 2
  epochs = np.reshape(read, (3, -1)).tolist()
  assert all(sorted(epoch) == FULL for epoch in epochs)
  assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
  assert order(Lanes(documents(), 1, 8, seed=8), len(FULL)) != epochs[0]
  lanes = Lanes(documents(), 1, 8, seed=0, shuffle=False)
  assert order(lanes, 2 * len(FULL)) == FULL * 2


def test_one_epoch_without_shuffle_reads_the_longest_first():
  lanes = Lanes(documents(), 3, 8, seed=0, shuffle=False, repeat=False)
  batches = [batch for batch, _ in lanes]
  assert batches[0].document_B.tolist() == [4, 2, 9]
  assert len(batches) == 6  # The fewest for 17 segments in 3 rows.
  # (20, 20) has more tokens than (3, 30), but fewer segments.
  data = pairs([(20, 20), (5, 2), (3, 30)])
  lanes = Lanes(data, 1, 16, seed=0, shuffle=False, repeat=False)
  assert order(lanes, 3) == [2, 0, 1]


def test_orders_are_the_same_on_every_machine():
  """Golden, from NumPy 2.4: another order would break all saved runs."""
  indices = lanes_lib.shuffled(np.full(8, 4), seed=11, epoch=0)
  assert indices.tolist() == [3, 6, 0, 7, 4, 1, 2, 5]
  indices = lanes_lib.longest_first(np.array(LENGTHS), 8)
  assert indices.tolist() == [4, 2, 9, 6, 0, 3, 5, 7]
  indices = lanes_lib.shuffled(np.ones(8), 4, 0, 1)
  assert indices.tolist() == [1, 0, 6, 7, 5, 3, 2, 4]
  batches = (batch.document_B.tolist() for batch, _ in pair_batches())
  first = [[5, 12], [18, 15], [13, 6, 10, 17]]
  assert [*itertools.islice(batches, 3)] == first


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('make', [documents, pairs])
def test_positions_count_tokens_and_padding(make, mode):
  tokens = padding = 0
  lanes = Lanes(make(), 3, 8, seed=9, local_rows=np.arange(3), **mode)
  for step, (batch, position) in enumerate(take(lanes, 15), 1):
    tokens += int(batch.mask_BT.sum())
    padding += int((~batch.mask_BT).sum())
    assert position['step'] == step
    assert (position['tokens'], position['padding']) == (tokens, padding)


@pytest.mark.parametrize(
  'name, other',
  [
    ('rows', {'rows': 4}),
    ('segment', {'segment': 16}),
    ('seed', {'seed': 2}),
    ('shuffle', {'shuffle': False}),
    ('shorter_first', {'shorter_first': ShorterFirst(4, 2)}),
    ('repeat', {'repeat': False}),
    ('documents', {'documents': documents(LENGTHS[:-1])}),
    ('documents', {'documents': documents(labeled=True)}),
  ],
)
def test_positions_of_other_lanes_are_refused(name, other):
  settings = {'documents': documents(), 'rows': 3, 'segment': 8, 'seed': 1}
  _, position = next(Lanes(**settings))
  lanes = Lanes(**(settings | other))
  with pytest.raises(ValueError, match=f'saved with {name} ='):
    lanes.seek(position)


def test_invalid_settings_are_refused():
  position = Lanes(documents(), 3, 8, seed=1).position
  del position['offset_B']
  with pytest.raises(ValueError, match='offset_B'):
    Lanes(documents(), 3, 8, seed=1).seek(position)
  for sizes in (0, 8), (3, 0):
    with pytest.raises(ValueError, match='BATCH and SEGMENT'):
      Lanes(documents(), *sizes, seed=0)
  with pytest.raises(ValueError, match='2 documents are empty'):
    Lanes(documents([0, 0]), 3, 8, seed=0)
  for segment, first in (9, None), (8, ShorterFirst(3, 2)):
    Lanes(documents(), 3, segment, seed=0, shorter_first=first)
    with pytest.raises(ValueError, match='SEGMENT and FIRST_SEGMENT'):
      Lanes(pairs(), 3, segment, seed=0, shorter_first=first)
  for name in 'segment', 'steps':
    with pytest.raises(ValueError, match=f'FIRST_{name.upper()}'):
      ShorterFirst(**({'segment': 4, 'steps': 2} | {name: 0}))


@pytest.mark.parametrize('shuffle', [True, False])
@SIZES
def test_an_epoch_reads_both_sequences_of_each_pair(rows, segment, shuffle):
  """Each label is at the end of the last segment of its pair."""
  data = pairs()
  lanes = Lanes(data, rows, segment, seed=1, shuffle=shuffle, repeat=False)
  tokens, labeled, half = [], [], segment // 2
  for batch, _ in lanes:
    for row, column in np.argwhere(batch.mask_BT):
      side, i = divmod(int(column), half)
      offset = int(batch.offset_B[row]) + i
      token = int(batch.tokens_BT[row, column])
      tokens.append((int(batch.document_B[row]), side, offset, token))
    assert not batch.tokens_BT[~batch.mask_BT].any()
    assert not batch.targets_BT[:, :-1].any()
    np.testing.assert_array_equal(batch.scored_BT, batch.targets_BT > 0)
    for row, document in enumerate(batch.document_B.tolist()):
      left = max(PAIRS[document]) - batch.offset_B[row]
      ends = document >= 0 and left <= half
      assert batch.targets_BT[row, -1] == (document + 1 if ends else 0)
      labeled += [document] if ends else []
      assert batch.start_B[row] == (document >= 0 and not batch.offset_B[row])
  assert sorted(labeled) == list(range(len(PAIRS)))
  assert sorted(tokens) == sorted(
    (i, side, offset, int(token))
    for i in range(len(data))
    for side, part in enumerate(np.split(data[i], [data.first_lengths[i]]))
    for offset, token in enumerate(part)
  )


@pytest.mark.parametrize('mode', MODES)
def test_lanes_of_pairs_resume_on_all_hosts(mode):
  make = lambda **local: Lanes(
    pairs(), 4, 8, seed=4, shorter_first=ShorterFirst(4, 2), **mode, **local
  )
  assert_resumes(make, 15)
  assert_hosts_share(make, [np.arange(1), np.arange(1, 4)], 9)


def pair_batches(**changes):
  """Batches of 2 long or 4 short pairs: 8 in an epoch."""
  settings = {'rows': 2, 'segment': 32, 'source_segment': 24, 'buckets': 2}
  settings |= {'documents': pairs(PAIRS * 3), 'seed': 4} | changes
  return PairBatches(**settings)


@pytest.mark.parametrize('mode', MODES)
def test_batches_of_pairs_resume_on_all_hosts(mode):
  make = functools.partial(pair_batches, **mode)
  assert_resumes(make, 20)
  assert_hosts_share(make, [np.array([0]), np.array([1])], 20)
  batches = take(make(), 20)
  assert len(batches) == (20 if mode['repeat'] else 8)
  assert batches[-1][1]['epoch'] == (2 if mode['repeat'] else 0)


def test_each_epoch_groups_and_orders_pairs_in_its_own_way():
  batches = [batch for batch, _ in take(pair_batches(), 24)]
  epochs = [batches[i : i + 8] for i in range(0, 24, 8)]
  groups, orders = [], []
  for epoch in epochs:
    read = np.concatenate([batch.document_B for batch in epoch])
    assert sorted(read[read >= 0]) == list(range(21))
    groups.append({frozenset(batch.document_B.tolist()) for batch in epoch})
    orders.append([len(batch.document_B) for batch in epoch])
  for found in groups, orders:
    assert found[0] != found[1] != found[2] != found[0]


@pytest.mark.parametrize(
  'name, other',
  [
    ('rows', {'rows': 4}),
    ('segment', {'segment': 64}),
    ('source_segment', {'source_segment': 48}),
    ('buckets', {'buckets': 1}),
    ('seed', {'seed': 2}),
    ('shuffle', {'shuffle': False}),
    ('repeat', {'repeat': False}),
    ('documents', {'documents': pairs()}),
  ],
)
def test_positions_of_other_batches_of_pairs_are_refused(name, other):
  _, position = next(pair_batches())
  with pytest.raises(ValueError, match=f'saved with {name} ='):
    pair_batches(**other).seek(position)


def threads():
  return [t for t in threading.enumerate() if t.name == 'prefetch']


@pytest.mark.parametrize('depth', [1, 2, 9])
def test_prefetched_items_are_the_same_in_order(depth):
  assert list(prefetch(iter(range(7)), depth)) == list(range(7))
  assert not threads()


def test_at_most_depth_items_are_prepared():
  made = []

  def items():
    for i in range(9):
      made.append(i)
      yield i

  ahead = prefetch(items(), 2)
  assert next(ahead) == 0
  time.sleep(0.2)
  # One is taken, two wait, and the thread holds one more.
  assert made == [0, 1, 2, 3]
  # Closing ends the thread, which is blocked.
  assert len(threads()) == 1
  ahead.close()
  assert not threads()


def test_an_error_is_raised_after_the_items_before_it():
  def items():
    yield 1
    raise KeyError('broken')

  ahead = prefetch(items(), 4)
  assert next(ahead) == 1
  with pytest.raises(KeyError, match='broken'):
    next(ahead)
  assert not threads()
  with pytest.raises(ValueError, match='got 0'):
    prefetch(iter([]), 0)
