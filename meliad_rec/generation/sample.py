"""A sample of text, written while a model trains."""

import dataclasses

import numpy as np

from meliad_rec.data.documents import Documents
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.generation.decoder import Decoder
from meliad_rec.generation.sampling import Sampler


@dataclasses.dataclass(frozen=True)
class Sample:
  """What is written at each evaluation.

  Attributes:
    prompt: tokens of the first document to go on from; at least 1.
    length: tokens to write; 0: no sample.
    sampler: how they are drawn.
    seed: of the drawing.
  """

  prompt: int = 200
  length: int = 200
  sampler: Sampler = Sampler(temperature=0.8)
  seed: int = 0

  def write(
    self, decoder: Decoder, documents: Documents, vocabulary: Vocabulary
  ) -> str:
    """The end of the prompt, a bar, and what the model writes after it."""
    prompt_T = np.asarray(documents[0][: self.prompt], np.int32)
    reading = decoder.read(decoder.start(1), prompt_T[None])
    written = [
      tokens_BT[0]
      for _, tokens_BT in decoder.generate(
        reading, self.length, self.sampler, self.seed
      )
    ]
    before = vocabulary.decode(prompt_T)
    after = vocabulary.decode(np.concatenate([prompt_T, *written]))
    return f'{before}|{after[len(before) :]}'
