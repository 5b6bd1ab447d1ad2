"""Laws of lanes: every token is a target once, wherever a run stops."""

import itertools
import json

import jax
import numpy as np
import pytest

from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.lanes import Lanes
from meliad_rec.data.lanes import ShorterFirst
from meliad_rec.data.prefetch import prefetch
from meliad_rec.data.vocabulary import Bytes

LENGTHS = [5, 0, 17, 8, 40, 3, 16, 1, 0, 23]
KINDS = [
  {'shuffle': shuffle, 'repeat': repeat}
  for shuffle in (True, False)
  for repeat in (True, False)
]


def documents(lengths=LENGTHS, labelled=False):
  """With labels, of which a third is 0."""
  rng = np.random.default_rng(0)

  def document(i, length):
    ids = rng.integers(3, 259, length)
    labels = (ids + 7) % 259 * (ids % 3 > 0) if labelled else None
    return Document(str(i), ids, length, 1, labels)

  return Documents.collect(map(document, range(len(lengths)), lengths), Bytes())


def take(lanes, count=None):
  return list(itertools.islice(lanes, count))


def equal(batch, other):
  return jax.tree.all(
    jax.tree.map(
      lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), batch, other
    )
  )


def places(batches):
  """(document, place, input, target) of every real target."""
  for batch in batches:
    for row, column in np.argwhere(batch.mask_BT):
      yield (
        int(batch.document_B[row]),
        int(batch.offset_B[row] + column),
        int(batch.tokens_BT[row, column]),
        int(batch.targets_BT[row, column]),
      )


@pytest.mark.parametrize('shuffle', [True, False])
@pytest.mark.parametrize('rows, segment', [(3, 8), (1, 5), (20, 4), (2, 64)])
def test_one_pass_predicts_every_token_once(rows, segment, shuffle):
  data = documents()
  lanes = Lanes(data, rows, segment, seed=1, shuffle=shuffle, repeat=False)
  expected = sorted(
    (i, place, int(data[i][place - 1]) if place else 0, int(token))
    for i in range(len(data))
    for place, token in enumerate(data[i])
  )
  assert sorted(places(batch for batch, _ in lanes)) == expected


@pytest.mark.parametrize('rows, segment', [(3, 8), (1, 5), (20, 4), (2, 64)])
def test_one_pass_meets_every_label_once_beside_its_token(rows, segment):
  data = documents(labelled=True)
  lanes = Lanes(data, rows, segment, seed=1, repeat=False)
  batches = [batch for batch, _ in lanes]
  expected = sorted(
    (i, place, int(token), (int(token) + 7) % 259 * (token % 3 > 0))
    for i in range(len(data))
    for place, token in enumerate(data[i])
  )
  assert sorted(places(batches)) == expected
  for batch in batches:
    scored_BT = batch.mask_BT & (batch.tokens_BT % 3 > 0)
    np.testing.assert_array_equal(batch.scored_BT, scored_BT)


def test_of_text_all_is_scored():
  for batch, _ in Lanes(documents(), 3, 8, seed=3, repeat=False):
    np.testing.assert_array_equal(batch.scored_BT, batch.mask_BT)


@pytest.mark.parametrize('kind', KINDS)
def test_rows_read_on_and_start_only_new_documents(kind):
  lanes = Lanes(documents(), 3, 8, seed=2, **kind)
  before = [(-1, 0, 0)] * 3
  for batch, _ in take(lanes, 12):
    for row in range(3):
      document, offset = int(batch.document_B[row]), int(batch.offset_B[row])
      past, place, length = before[row]
      goes_on = place + 8 < length
      assert batch.start_B[row] == (not goes_on and document >= 0)
      assert (document, offset) == (past, place + 8) or not goes_on
      assert goes_on or offset == 0
      length = LENGTHS[document] if document >= 0 else 0
      before[row] = document, offset, length


def test_padding_is_zero_and_masked():
  for batch, _ in Lanes(documents(), 3, 8, seed=3, repeat=False):
    assert not batch.targets_BT[~batch.mask_BT].any()
    assert not batch.tokens_BT[~batch.mask_BT].any()
    assert (batch.targets_BT[batch.mask_BT] > 0).all()
    assert batch.tokens_BT.dtype == batch.targets_BT.dtype == np.int32


def test_rows_that_ran_out_are_masked():
  batches = [
    b for b, _ in Lanes(documents([20, 3]), 2, 8, seed=0, repeat=False)
  ]
  assert len(batches) == 3
  for batch in batches[1:]:
    out = batch.document_B < 0
    assert out.sum() == 1
    assert not batch.mask_BT[out].any()
    assert not batch.start_B[out].any()
    assert not batch.offset_B[out].any()


def test_the_first_batches_may_be_shorter():
  """Each document is still read whole, and a run goes on from each place."""
  make = lambda: Lanes(
    documents(), 3, 8, seed=1, repeat=False, shorter_first=ShorterFirst(3, 4)
  )
  batches = take(make())
  lengths = [batch.tokens_BT.shape[1] for batch, _ in batches]
  assert lengths == [3] * 4 + [8] * (len(lengths) - 4)
  pairs = sorted(places(batch for batch, _ in batches))
  assert [(d, p) for d, p, *_ in pairs] == [
    (d, p) for d, length in enumerate(LENGTHS) for p in range(length)
  ]
  for step, (_, position) in enumerate(batches):
    lanes = make()
    lanes.seek(json.loads(json.dumps(position)))
    for (batch, after), (expected, there) in zip(
      lanes, batches[step + 1 :], strict=True
    ):
      assert equal(batch, expected) and after == there


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('depth', [None, 3])
def test_a_run_goes_on_from_any_position(kind, depth):
  whole = take(Lanes(documents(), 3, 8, seed=4, **kind), 20)
  for step, (_, position) in enumerate(whole):
    lanes = Lanes(documents(), 3, 8, seed=4, **kind)
    lanes.seek(json.loads(json.dumps(position)))
    assert lanes.position == position
    items = prefetch(lanes, depth) if depth else lanes
    rest = take(items, 20 - step - 1)
    for (batch, after), (expected, there) in zip(
      rest, whole[step + 1 :], strict=True
    ):
      assert equal(batch, expected) and after == there


def test_going_back_reads_the_same_again():
  lanes = Lanes(documents(), 3, 8, seed=5)
  begin = lanes.position
  first = take(lanes, 9)
  lanes.seek(begin)
  again = take(lanes, 9)
  for (batch, after), (expected, there) in zip(again, first, strict=True):
    assert equal(batch, expected) and after == there


@pytest.mark.parametrize('kind', KINDS)
def test_hosts_share_the_rows_of_the_same_batches(kind):
  whole = take(Lanes(documents(), 4, 8, seed=6, **kind), 15)
  parts = [np.array([0, 3]), np.array([1, 2])]
  halves = [
    take(Lanes(documents(), 4, 8, seed=6, local_rows=rows, **kind), 15)
    for rows in parts
  ]
  for (batch, there), (outer, one), (inner, two) in zip(
    whole, *halves, strict=True
  ):
    for half, rows in (outer, parts[0]), (inner, parts[1]):
      assert equal(half, jax.tree.map(lambda a, rows=rows: a[rows], batch))
    assert one == two == there


def test_rows_that_share_one_stream_read_on_from_places_of_their_own():
  """As the papers of enwik8 cut it: 40 tokens, 10 segments, 4 rows."""
  lanes = Lanes(documents([40]), 4, 4, seed=0)
  batches = [batch for batch, _ in take(lanes, 10)]
  offset_NB = np.array([batch.offset_B for batch in batches])
  assert offset_NB[0].tolist() == [0, 8, 20, 28]
  # Round the stream, so that all of them have read all of it.
  expected_NB = (offset_NB[0] + 4 * np.arange(10)[:, None]) % 40
  np.testing.assert_array_equal(offset_NB, expected_NB)
  start_NB = np.array([batch.start_B for batch in batches])
  assert start_NB[0].all()  # Whatever the model carries is of no document.
  np.testing.assert_array_equal(start_NB[1:], offset_NB[1:] == 0)
  data = documents([40])
  np.testing.assert_array_equal(batches[0].tokens_BT[1], data[0][7:11])
  np.testing.assert_array_equal(batches[0].targets_BT[1], data[0][8:12])


def test_what_has_labels_is_read_from_the_beginning_by_all_who_share_it():
  batch, _ = next(Lanes(documents([40, 17], labelled=True), 7, 4, seed=3))
  assert (batch.offset_B == 0).all()


@pytest.mark.parametrize('first', [None, ShorterFirst(2, 3)])
def test_runs_of_shared_documents_go_on_and_are_the_same_on_all_hosts(first):
  make = lambda **options: Lanes(
    documents([40, 0, 17]), 7, 4, seed=3, shorter_first=first, **options
  )
  begin, whole = make().position, take(make(), 15)
  places = zip(whole[0][0].document_B, whole[0][0].offset_B, strict=True)
  assert len({*places}) == 7
  positions = [begin, *(position for _, position in whole)]
  for step, position in enumerate(positions):
    lanes = make()
    lanes.seek(json.loads(json.dumps(position)))
    rest = take(lanes, 15 - step)
    for (batch, after), (expected, there) in zip(
      rest, whole[step:], strict=True
    ):
      assert equal(batch, expected) and after == there
  rows = np.array([1, 4, 6])
  for (part, one), (batch, there) in zip(
    take(make(local_rows=rows), 15), whole, strict=True
  ):
    assert one == there
    assert equal(part, jax.tree.map(lambda a: a[rows], batch))


@pytest.mark.parametrize(
  'make, rows, options',
  [
    (documents, 8, {}),  # As many as hold anything.
    (documents, 20, {'repeat': False}),
    (lambda: pairs(), 20, {}),
  ],
)
def test_nothing_begins_in_the_middle_elsewhere(make, rows, options):
  (first, _), *_ = take(Lanes(make(), rows, 4, seed=1, **options), 1)
  assert not first.offset_B.any()


def order(lanes, count):
  """Documents in the order in which one row reads them."""
  started = (int(b.document_B[0]) for b, _ in lanes if b.start_B[0])
  return list(itertools.islice(started, count))


def test_each_epoch_reads_every_document_once_in_its_own_order():
  full = [i for i, length in enumerate(LENGTHS) if length]
  read = order(Lanes(documents(), 1, 8, seed=7), 3 * len(full))
  epochs = [read[i : i + len(full)] for i in range(0, len(read), len(full))]
  assert all(sorted(epoch) == full for epoch in epochs)
  assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
  assert order(Lanes(documents(), 1, 8, seed=8), len(full)) != epochs[0]


def test_without_shuffle_documents_come_as_they_lie():
  full = [i for i, length in enumerate(LENGTHS) if length]
  lanes = Lanes(documents(), 1, 8, seed=0, shuffle=False)
  assert order(lanes, 2 * len(full)) == full * 2


def test_one_pass_without_shuffle_reads_the_longest_first():
  lanes = Lanes(documents(), 3, 8, seed=0, shuffle=False, repeat=False)
  batches = [batch for batch, _ in lanes]
  assert batches[0].document_B.tolist() == [4, 2, 9]
  # 17 segments in 3 rows take 6 steps at best.
  assert len(batches) == 6


@pytest.mark.parametrize('kind', KINDS)
def test_counters_tell_what_was_read(kind):
  tokens = padding = 0
  lanes = Lanes(documents(), 3, 8, seed=9, local_rows=np.arange(3), **kind)
  for step, (batch, position) in enumerate(take(lanes, 15), 1):
    tokens += int(batch.mask_BT.sum())
    padding += int((~batch.mask_BT).sum())
    assert position['step'] == step
    assert position['tokens'] == tokens
    assert position['padding'] == padding


def test_short_documents_follow_one_another_in_a_lane():
  lanes = Lanes(documents([3, 7, 2, 6]), 1, 8, seed=0, repeat=False)
  items = list(lanes)
  assert all(batch.start_B[0] for batch, _ in items)
  assert items[-1][1]['tokens'] == 18 and items[-1][1]['padding'] == 14


def test_nothing_but_empty_documents_is_refused():
  with pytest.raises(ValueError, match='all of the 2 documents are empty'):
    Lanes(documents([0, 0]), 3, 8, seed=0)


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
    ('documents', {'documents': documents(labelled=True)}),
  ],
)
def test_a_position_of_other_lanes_is_refused(name, other):
  settings = {'documents': documents(), 'rows': 3, 'segment': 8, 'seed': 1}
  _, position = next(Lanes(**settings))
  lanes = Lanes(**(settings | other))
  with pytest.raises(ValueError, match=f'saved with {name} ='):
    lanes.seek(position)


def test_what_is_no_position_is_refused():
  lanes = Lanes(documents(), 3, 8, seed=1)
  position = lanes.position
  del position['offset_B']
  with pytest.raises(ValueError, match='offset_B'):
    lanes.seek(position)


@pytest.mark.parametrize('sizes', [(0, 8), (3, 0)])
def test_sizes_below_one_are_refused(sizes):
  with pytest.raises(ValueError, match='rows and . tokens hold none'):
    Lanes(documents(), *sizes, seed=0)


# Tokens of the two sequences of each pair.
SIDES = [(5, 2), (17, 20), (1, 1), (8, 8), (3, 30), (16, 1), (9, 12)]


def pairs(sides=SIDES):
  """The label of pair i is i + 1."""
  rng = np.random.default_rng(0)

  def document(i, side):
    ids = rng.integers(3, 259, sum(side))
    labels = np.zeros(len(ids), int)
    labels[-1] = i + 1
    return Document(str(i), ids, len(ids), 1, labels, side[0])

  return Documents.collect(map(document, range(len(sides)), sides), Bytes())


def halves(batches):
  """(document, sequence, place, input) of every real token."""
  for batch in batches:
    half = batch.tokens_BT.shape[1] // 2
    for row, column in np.argwhere(batch.mask_BT):
      side, place = divmod(int(column), half)
      yield (
        int(batch.document_B[row]),
        side,
        int(batch.offset_B[row]) + place,
        int(batch.tokens_BT[row, column]),
      )


@pytest.mark.parametrize('shuffle', [True, False])
@pytest.mark.parametrize('rows, segment', [(3, 8), (1, 2), (20, 4), (2, 64)])
def test_one_pass_reads_both_sequences_of_each_pair(rows, segment, shuffle):
  data = pairs()
  lanes = Lanes(data, rows, segment, seed=1, shuffle=shuffle, repeat=False)
  batches = [batch for batch, _ in lanes]
  expected = sorted(
    (i, side, place, int(token))
    for i in range(len(data))
    for side, part in enumerate(np.split(data[i], [data.middles[i]]))
    for place, token in enumerate(part)
  )
  assert sorted(halves(batches)) == expected


@pytest.mark.parametrize('rows, segment', [(3, 8), (1, 2), (20, 4), (2, 64)])
def test_a_pair_has_its_label_at_the_end_of_its_last_segment(rows, segment):
  lanes = Lanes(pairs(), rows, segment, seed=1, repeat=False)
  found = []
  for batch, _ in lanes:
    assert not batch.targets_BT[:, :-1].any()
    np.testing.assert_array_equal(batch.scored_BT, batch.targets_BT > 0)
    for row in range(rows):
      document, label = int(batch.document_B[row]), batch.targets_BT[row, -1]
      left = max(SIDES[document]) - batch.offset_B[row]
      ends = document >= 0 and left <= segment // 2
      assert label == (document + 1 if ends else 0)
      found += [document] if ends else []
      assert batch.start_B[row] == (document >= 0 and not batch.offset_B[row])
  assert sorted(found) == list(range(len(SIDES)))


@pytest.mark.parametrize('kind', KINDS)
def test_pairs_go_on_from_any_position_and_are_counted(kind):
  make = lambda: Lanes(
    pairs(), 3, 8, seed=4, shorter_first=ShorterFirst(4, 2), **kind
  )
  whole = take(make(), 15)
  tokens = padding = 0
  for step, (batch, position) in enumerate(whole):
    tokens += int(batch.mask_BT.sum())
    padding += int((~batch.mask_BT).sum())
    assert (position['tokens'], position['padding']) == (tokens, padding)
    lanes = make()
    lanes.seek(json.loads(json.dumps(position)))
    for (batch, after), (expected, there) in zip(
      take(lanes, 14 - step), whole[step + 1 :], strict=True
    ):
      assert equal(batch, expected) and after == there


def test_hosts_share_the_rows_of_pairs():
  whole = take(Lanes(pairs(), 4, 8, seed=6), 9)
  parts = [
    take(Lanes(pairs(), 4, 8, seed=6, local_rows=rows), 9)
    for rows in (np.arange(1), np.arange(1, 4))
  ]
  for (batch, there), (upper, one), (lower, two) in zip(
    whole, *parts, strict=True
  ):
    joined = jax.tree.map(lambda a, b: np.concatenate([a, b]), upper, lower)
    assert equal(joined, batch)
    assert one == two == there


def test_the_pair_with_the_longest_sequence_comes_first():
  """(20, 20) has more tokens than (3, 30), and fewer segments."""
  data = pairs([(20, 20), (5, 2), (3, 30)])
  lanes = Lanes(data, 1, 16, seed=0, shuffle=False, repeat=False)
  assert order(lanes, 3) == [2, 0, 1]


@pytest.mark.parametrize(
  ('segment', 'first', 'told'),
  [(9, None, '9 and 9 tokens'), (8, ShorterFirst(3, 2), '3 and 8 tokens')],
)
def test_pairs_share_a_segment_evenly(segment, first, told):
  Lanes(documents(), 3, segment, seed=0, shorter_first=first)
  with pytest.raises(ValueError, match=f'{told}; set SEGMENT, and FIRST_SEG'):
    Lanes(pairs(), 3, segment, seed=0, shorter_first=first)
