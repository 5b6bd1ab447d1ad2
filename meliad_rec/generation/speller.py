"""Tokens to text as they are written, in whole characters."""

import codecs
from collections.abc import Sequence

import numpy as np

from meliad_rec.data.vocabulary import Vocabulary


class Speller:
  """The text of one document's tokens, piece by piece.

  A character whose bytes are spread over tokens comes out with its last byte.

  Args:
    vocabulary: what the ids mean.
    before: the last ids before the first piece; empty at a document's start.
  """

  def __init__(self, vocabulary: Vocabulary, before: Sequence[int] = ()):
    self._vocabulary = vocabulary
    self._bytes = codecs.getincrementaldecoder('utf-8')('replace')
    self._context = []
    self.add(before)

  def add(self, ids: Sequence[int]) -> str:
    """The characters that these ids complete."""
    ids = np.asarray(ids, np.int64).tolist()
    both = self._context + ids
    spelled = self._vocabulary.token_bytes(np.asarray(both, np.int64))
    new = spelled[len(self._context) :]
    # A token's bytes may depend on whether only spaces precede it, so what is
    # kept reaches back to one that is no space.
    words = [i for i, piece in enumerate(spelled) if piece.strip(b' ')]
    self._context = both[words[-1] :] if words else both
    return self._bytes.decode(b''.join(new))

  def end(self) -> str:
    """U+FFFD if the text ends within a character, else nothing."""
    return self._bytes.decode(b'', final=True)
