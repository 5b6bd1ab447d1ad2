"""Text in and text out: a decoder and the vocabulary of its model.

Tokens to text as they are written, in whole characters.
"""

import codecs
from collections.abc import Iterator
from collections.abc import Sequence

import numpy as np

from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.generation.decoder import Decoder
from meliad_rec.generation.decoder import Reading
from meliad_rec.generation.sampling import Sampler


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


class Writer:
  """Reads text, and writes what the model says next."""

  def __init__(self, decoder: Decoder, vocabulary: Vocabulary):
    self.decoder = decoder
    self.vocabulary = vocabulary

  def read(self, text: str, reading: Reading | None = None) -> Reading:
    """Where the model stands behind a text; as fast at any depth.

    Args:
      text: any length.
      reading: where the text before it ended; None: it begins a document.
    """
    reading = self.decoder.start(1) if reading is None else reading
    ids_T = self.vocabulary.encode(text)
    rows = len(reading.recent_BN)
    return self.decoder.read(reading, np.tile(ids_T, (rows, 1)))

  def write(
    self, reading: Reading, tokens: int, sampler: Sampler, seed: int
  ) -> Iterator[tuple[Reading, list[str]]]:
    """Yields where it stands, and the next piece of text of each row."""
    spellers = [
      Speller(self.vocabulary, [i for i in row if i])
      for row in np.asarray(reading.recent_BN).tolist()
    ]
    end = reading
    for end, ids_BT in self.decoder.generate(reading, tokens, sampler, seed):
      pairs = zip(spellers, ids_BT, strict=True)
      yield end, [speller.add(ids) for speller, ids in pairs]
    yield end, [speller.end() for speller in spellers]
