"""Labels and pairs that do not fit their documents are refused."""

import dataclasses

import numpy as np
import pytest

from meliad_rec.data import documents as labelled
from meliad_rec.data.documents import Document

LENGTHS = (5, 2, 4)
STARTS = np.cumsum([0, *LENGTHS])
TOKENS = np.arange(1, STARTS[-1] + 1)
LABELS = np.zeros(len(TOKENS), int)
LABELS[STARTS[1:] - 1] = 1, 0, 3
MIDDLES = np.array([1, 1, 3])


@dataclasses.dataclass
class Facts:
  tokens: np.ndarray = dataclasses.field(default_factory=TOKENS.copy)
  starts: np.ndarray = dataclasses.field(default_factory=STARTS.copy)
  labels: np.ndarray | None = dataclasses.field(default_factory=LABELS.copy)
  middles: np.ndarray | None = dataclasses.field(default_factory=MIDDLES.copy)

  def check(self):
    labelled.check(self.tokens, self.starts, self.labels, self.middles)


def test_what_fits():
  Facts().check()
  Facts(middles=None).check()
  Facts(middles=None, labels=TOKENS).check()
  Facts(middles=None, labels=None).check()
  none = np.zeros(0, int)
  Facts(none, np.zeros(1, int), none, none).check()


@pytest.mark.parametrize(
  ('changes', 'told'),
  [
    ({'labels': LABELS[:-1]}, '10 labels for 11 tokens; give each token one'),
    ({'middles': MIDDLES[:-1]}, '2 middles for 3 documents; give each'),
    ({'middles': np.array([1, 0, 3])}, 'middle of document 1 is 0 of 2 tokens'),
    ({'middles': np.array([5, 1, 4])}, 'middle of document 0 is 5 of 5 tokens'),
    ({'labels': None}, 'Documents have middles, and no labels; give each pair'),
    ({'labels': LABELS + 1}, 'A pair of sequences has a label before its last'),
  ],
)
def test_what_does_not_fit_is_told(changes, told):
  with pytest.raises(ValueError, match=told):
    Facts(**changes).check()


def document(name, length, labels=True, middle=None):
  ids = np.arange(1, length + 1)
  return Document(name, ids, length, 1, ids if labels else None, middle)


def test_labels_and_middles_are_collected():
  found = labelled.collect_labels(
    [document('a', 3, True, 2), document('b', 2, True, 1)], [3, 2]
  )
  labels, middles = found
  assert labels.tolist() == [1, 2, 3, 1, 2]
  assert middles.tolist() == [2, 1] and middles.dtype == np.int64
  assert labelled.collect_labels([document('a', 3, False)], [3]) == (None, None)
  assert labelled.collect_labels([], []) == (None, None)


def test_only_some_documents_are_pairs():
  told = '^1 of 2 documents are pairs of sequences; give each document'
  with pytest.raises(ValueError, match=told):
    labelled.collect_labels(
      [document('a', 3, True, 2), document('b', 2)], [3, 2]
    )


def test_sides_are_the_sequences_of_a_document():
  lengths = np.array(LENGTHS)
  assert labelled.side_lengths(None, lengths).tolist() == [[5], [2], [4]]
  assert labelled.side_lengths(MIDDLES, lengths).tolist() == [
    [1, 4],
    [1, 1],
    [3, 1],
  ]
