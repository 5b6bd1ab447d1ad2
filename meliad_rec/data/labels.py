"""Labels, where it is not the next token that is to be predicted.

A label is of a token, or of a pair of sequences: each pair is a document, the
second sequence behind the first, and its label lies on its last token.
"""

from collections.abc import Sequence

import numpy as np


def check(
  tokens: np.ndarray,
  starts: np.ndarray,
  labels: np.ndarray | None,
  middles: np.ndarray | None,
) -> None:
  """Raises ValueError where labels do not fit their documents.

  Args:
    tokens: ids of all documents.
    starts: [documents + 1], where each begins.
    labels: one for each token; None: there are none.
    middles: [documents], tokens of the first sequence of each pair; None:
      documents are no pairs.
  """
  if labels is not None and labels.shape != tokens.shape:
    raise ValueError(
      f'There are {len(labels)} labels for {len(tokens)} tokens; give each '
      'token one, 0 where it is not scored, or none.'
    )
  if middles is None:
    return
  lengths = np.diff(starts)
  if middles.shape != lengths.shape:
    raise ValueError(
      f'There are {len(middles)} middles for {len(lengths)} documents; give '
      'each document one, or none.'
    )
  wrong = np.flatnonzero((middles < 1) | (middles >= lengths))
  if len(wrong):
    i = wrong[0]
    raise ValueError(
      f'The middle of document {i} is {middles[i]} of {lengths[i]} tokens; '
      'each of the two sequences of a pair needs 1 token or more.'
    )
  if labels is None:
    raise ValueError(
      'Documents have middles, and no labels; give each pair of sequences a '
      'label on its last token, or no middles.'
    )
  if np.count_nonzero(labels) > np.count_nonzero(labels[starts[1:] - 1]):
    raise ValueError(
      'A pair of sequences has a label before its last token; make it 0.'
    )


def collect(
  documents: Sequence, lengths: Sequence[int]
) -> tuple[np.ndarray | None, np.ndarray | None]:
  """Labels of all tokens of some documents, and middles; None: there are none.

  Args:
    documents: whose `labels` and `middle` are read.
    lengths: tokens of each.

  Raises:
    ValueError: only some of the documents have them.
  """
  labels = [d.labels for d in documents if d.labels is not None]
  middles = [d.middle for d in documents if d.middle is not None]
  if labels and [*map(len, labels)] != [*lengths]:
    raise ValueError(
      f'{len(labels)} of {len(lengths)} documents have labels, '
      f'{sum(map(len, labels))} for {sum(lengths)} tokens; give each '
      'token of a split one, 0 where it is not scored, or none.'
    )
  if middles and len(middles) < len(lengths):
    raise ValueError(
      f'{len(middles)} of {len(lengths)} documents are pairs of sequences; '
      'give each document of a split a middle, or none.'
    )
  return (
    np.concatenate(labels) if labels else None,
    np.asarray(middles, np.int64) if middles else None,
  )


def sides(middles: np.ndarray | None, lengths: np.ndarray) -> np.ndarray:
  """[documents, 1 or 2], tokens of each sequence of documents.

  Args:
    middles: [documents], tokens of the first of two; None: there is one.
    lengths: [documents], tokens of all.
  """
  if middles is None:
    return lengths[:, None]
  return np.stack([middles, lengths - middles], 1)
