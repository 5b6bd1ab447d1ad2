"""Orders of documents."""

import numpy as np

from meliad_rec.data import lanes

LENGTHS = np.array([5, 0, 17, 8, 40, 3, 16, 1, 0, 23])
FULL = [0, 2, 3, 4, 5, 6, 7, 9]


def test_the_shuffle_is_this_one_on_every_machine():
  """Golden, from NumPy 2.4: another order would break all saved runs."""
  found = lanes.shuffled(np.full(8, 4), seed=11, epoch=0)
  assert found.tolist() == [3, 6, 0, 7, 4, 1, 2, 5]


def test_shuffles_hold_all_and_differ():
  found = [
    lanes.shuffled(LENGTHS, seed, epoch).tolist()
    for seed, epoch in [(0, 0), (0, 1), (1, 0)]
  ]
  assert all(sorted(each) == FULL for each in found)
  assert len({tuple(each) for each in found}) == 3


def test_as_they_lie():
  assert lanes.as_they_lie(LENGTHS).tolist() == FULL


def test_longest_first_counts_segments():
  found = lanes.longest_first(LENGTHS, 8)
  assert found.tolist() == [4, 2, 9, 6, 0, 3, 5, 7]


def test_rows_with_one_document_are_evenly_apart():
  document_B = np.array([2, 0, 1, 2, 1, 2, 2])
  found = lanes.apart(document_B, np.array([9, 1, 10]))
  assert found.tolist() == [0, 0, 0, 2, 0, 5, 7]


def test_rows_that_share_no_document_begin_with_it():
  found = lanes.apart(np.array([3, 0, 1]), np.full(4, 7))
  assert found.tolist() == [0, 0, 0]
