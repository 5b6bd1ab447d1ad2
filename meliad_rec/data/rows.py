"""A row of a segment: what it holds of a document, or of a pair."""

import itertools
from typing import NamedTuple

import numpy as np

from meliad_rec.data.documents import Documents


class Row(NamedTuple):
  """Inputs, targets, and which places are of the document."""

  tokens_T: np.ndarray  # int32; 0 where padded.
  targets_T: np.ndarray  # int32; 0 where padded.
  mask_T: np.ndarray  # bool

  @classmethod
  def empty(cls, places: int) -> 'Row':
    """All padding."""
    ids_T = np.zeros(places, np.int32)
    return cls(ids_T, ids_T.copy(), np.zeros(places, bool))


def read(documents: Documents, i: int, at: int, places: int) -> Row:
  """The next places of document i, padded.

  Text is shifted by one token, and its first input is 0; labels are not. Of a
  pair, each sequence has half of the places, its padding behind it, and the
  label stands at the last place of the row in which both are at their end.

  Args:
    documents: what is read.
    i: which of them; none if below 0.
    at: tokens of the document, or of each sequence of a pair, read before.
    places: of the row; an even number for pairs.
  """
  row = Row.empty(places)
  if i < 0:
    return row
  begin, end = documents.starts[i : i + 2]
  if documents.middles is None:
    real = slice(min(places, end - begin - at))
    row.tokens_T[real], row.targets_T[real] = documents.read(i, at, real.stop)
    row.mask_T[real] = True
    return row
  half, edges = places // 2, (begin, begin + documents.middles[i], end)
  for side, (first, last) in enumerate(itertools.pairwise(edges)):
    tokens = documents.tokens[first:last][at : at + half]
    here = slice(side * half, side * half + len(tokens))
    row.tokens_T[here], row.mask_T[here] = tokens, True
  if np.diff(edges).max() <= at + half:
    row.targets_T[-1] = documents.labels[end - 1]
  return row
