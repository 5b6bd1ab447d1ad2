"""One tokenised document."""

from typing import NamedTuple

import numpy as np

from meliad_rec.data.vocabulary import Vocabulary


class Document(NamedTuple):
  """One tokenised document: name, ids [n], UTF-8 bytes, whitespace words.

  Where tokens are labelled, `labels` are ids [n] too; 0 is not scored. Of a
  pair of sequences, the first `middle` tokens are the first of them.
  """

  name: str
  tokens: np.ndarray
  bytes_: int
  words: int
  labels: np.ndarray | None = None
  middle: int | None = None


def count_words(text: str) -> int:
  """Words between whitespace, as PG19's published counts are."""
  return len(text.split())


def token_dtype(vocabulary_size: int) -> np.dtype:
  """The smallest little-endian dtype that holds every id."""
  return np.dtype('<u2' if vocabulary_size <= 2**16 else '<u4')


def check_ids(document: Document, vocabulary: Vocabulary) -> None:
  """Raises ValueError where an id is 0, padding, or outside the vocabulary."""
  ids = document.tokens
  if len(ids) and not (ids.min() > 0 and ids.max() < vocabulary.size):
    raise ValueError(
      f'The document {document.name!r} holds an id outside 1 to '
      f'{vocabulary.size - 1}; tokenise it with another vocabulary.'
    )
