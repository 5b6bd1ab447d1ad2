"""Rows against the documents they are of, place by place."""

import numpy as np
import pytest

from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.lanes import read
from meliad_rec.data.lanes import Row
from meliad_rec.data.vocabulary import Bytes

LENGTHS = (9, 2, 7)
MIDDLES = (3, 1, 6)


def documents(labelled=False, pairs=False):
  rng = np.random.default_rng(0)
  made = []
  for i, (length, middle) in enumerate(zip(LENGTHS, MIDDLES, strict=True)):
    labels = rng.integers(1, 5, length) if labelled or pairs else None
    if pairs:
      labels[:-1] = 0
    ids = rng.integers(1, 200, length)
    middle = middle if pairs else None
    made.append(Document(f'{i}', ids, length, 1, labels, middle))
  return Documents.collect(made, Bytes())


def lists(row):
  return [part.tolist() for part in row]


@pytest.mark.parametrize('places', [1, 4, 12])
@pytest.mark.parametrize('labelled', [False, True])
def test_a_document_is_read_place_by_place(labelled, places):
  data = documents(labelled)
  for i, length in enumerate(LENGTHS):
    for at in range(0, length, places):
      row = read(data, i, at, places)
      expected = Row.empty(places)
      for place in range(min(places, length - at)):
        here = int(data.starts[i]) + at + place
        before = data.tokens[here - 1] if at + place else 0
        target = data.labels[here] if labelled else data.tokens[here]
        expected.tokens_T[place] = data.tokens[here] if labelled else before
        expected.targets_T[place] = target
        expected.mask_T[place] = True
      assert lists(row) == lists(expected)


@pytest.mark.parametrize('places', [2, 4, 10, 16])
def test_the_sequences_of_a_pair_are_read_side_by_side(places):
  data, half = documents(pairs=True), places // 2
  for i, middle in enumerate(MIDDLES):
    u, v = np.split(data[i], [middle])
    last = max(len(u), len(v))
    label = data.labels[data.starts[i + 1] - 1]
    read_u, read_v, labels = [], [], []
    for at in range(0, last, half):
      row = read(data, i, at, places)
      assert not row.targets_T[:-1].any()
      labels.append(row.targets_T[-1])
      read_u += row.tokens_T[:half][row.mask_T[:half]].tolist()
      read_v += row.tokens_T[half:][row.mask_T[half:]].tolist()
      # Padding is behind the tokens, and 0.
      for side in row.mask_T[:half], row.mask_T[half:]:
        assert (np.diff(side.astype(int)) <= 0).all()
      assert not row.tokens_T[~row.mask_T].any()
    assert (read_u, read_v) == (u.tolist(), v.tolist())
    assert labels == [0] * (len(labels) - 1) + [label]


def test_a_row_of_no_document_is_padding():
  row = read(documents(), -1, 0, 5)
  assert lists(row) == [[0] * 5, [0] * 5, [False] * 5]
  assert [part.dtype for part in row] == [np.int32, np.int32, bool]
  assert lists(row) == lists(Row.empty(5))
