"""A sample of text, generated while a model trains."""

from collections.abc import Callable
import dataclasses

import numpy as np

from meliad_rec.config.values import check_count
from meliad_rec.data.documents import Documents
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.generation.decoder import Decoder
from meliad_rec.generation.sampling import Sampler
from meliad_rec.generation.text import StreamingDetokenizer


@dataclasses.dataclass(frozen=True)
class Sample:
  """Settings of the sample that is generated at each evaluation.

  Attributes:
    prompt: number of tokens to read from the start of the first document, at
      least 1. The sample continues this text.
    length: number of tokens to generate; 0 disables the sample.
    sampler: draws the tokens.
    seed: seed of the draws.
  """

  prompt: int = 200
  length: int = 200
  sampler: Sampler = Sampler(temperature=0.8)
  seed: int = 0

  def __post_init__(self):
    check_count('prompt of the sample', self.prompt, 1)
    check_count('length of the sample', self.length, 0)

  def write(
    self,
    decoder: Decoder,
    documents: Documents,
    vocabulary: Vocabulary,
    stop: Callable[[], bool] = lambda: False,
  ) -> str | None:
    """Returns the prompt, a '|', and the text that the model generates.

    Returns None if `stop` returns True.

    Args:
      decoder: decoder of the model.
      documents: the first of them begins with the prompt.
      vocabulary: vocabulary of the documents.
      stop: called after each chunk of tokens that the decoder generates; if it
        returns True, generation ends.
    """
    prompt_T = np.asarray(documents[0][: self.prompt], np.int32)
    state = decoder.read(decoder.start(1), prompt_T[None])
    text = StreamingDetokenizer(vocabulary)
    before, after = text.add(prompt_T), []
    for _, tokens_BT in decoder.generate(
      state, self.length, self.sampler, self.seed
    ):
      after.append(text.add(tokens_BT[0]))
      if stop():
        return None
    return f'{before}|{"".join(after)}{text.end()}'
