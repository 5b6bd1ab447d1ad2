"""Text in and text out: a decoder and the vocabulary of its model."""

from collections.abc import Iterator

import numpy as np

from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.generation.decode import Decoder
from meliad_rec.generation.decode import Reading
from meliad_rec.generation.sampling import Sampler
from meliad_rec.generation.speller import Speller


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
