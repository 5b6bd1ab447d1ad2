r"""Copy and reverse as pairs: the source is digits, the target their copy.

Letters of this file: N pairs, X digits.
"""

import dataclasses

import numpy as np

from meliad_rec.data.dataset import Cached
from meliad_rec.data.documents import Documents
from meliad_rec.data.documents import SPLITS
from meliad_rec.data.documents import token_dtype
from meliad_rec.data.pairs import line_ids
from meliad_rec.data.synthetic import labeled
from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.vocabulary import END_OF_LINE
from meliad_rec.data.vocabulary import WordList

_DIGITS = '0123456789'
_TRIES = 100  # A pair of train is drawn again this many times.


@dataclasses.dataclass(frozen=True)
class CopyingPairs(Cached):
  """Copy or reverse from a source; the size is the number of digits.

  Pairs of validation and test are not in train, except for sizes of which train
  has all pairs: with 100,000 pairs of 1 to 12 digits, sizes 1 to 3.

  Attributes:
    sequences: number of pairs in train.
    min_size, max_size: bounds of the size; all sizes are equally likely.
    test_sequences: number of pairs in validation and in test.
    backward: whether the target begins with the last digit of the source.
    seed: seed of the pairs.
  """

  sequences: int = 100_000
  min_size: int = 1
  max_size: int = 12
  test_sequences: int = 1_000
  backward: bool = False
  seed: int = 0

  vocabulary = WordList([END_OF_LINE, *_DIGITS])
  splits = SPLITS

  def __post_init__(self):
    for name in 'sequences', 'min_size', 'test_sequences':
      setting = f'copying_pairs.CopyingPairs.{name}'
      labeled.check_setting(setting, getattr(self, name), 1)
    setting = 'copying_pairs.CopyingPairs.max_size'
    labeled.check_setting(setting, self.max_size, self.min_size)

  def _documents(self, split):
    sources = self._sources(split)
    size_N = np.array([len(digits) for digits in sources])
    ids = line_ids(' '.join(_DIGITS), self.vocabulary)
    digit_ids, end = ids[:-1], ids[-1:]
    order = slice(None, None, -1 if self.backward else 1)
    tokens = []
    for source in sources:
      digits = digit_ids[source]
      tokens += digits, end, digits[order], end
    first_lengths = size_N + 1
    return Documents(
      tokens=np.concatenate(tokens).astype(token_dtype(self.vocabulary.size)),
      starts=np.concatenate([[0], np.cumsum(2 * first_lengths)]),
      bytes_=2 * size_N,  # A digit and a space or newline.
      words=size_N,
      names=[f'{split}-{i}' for i in range(len(sources))],
      first_lengths=first_lengths,
    )

  def _sources(self, split: str) -> list[np.ndarray]:
    """Returns the digits of each source of a split."""
    N = self.sequences if split == 'train' else self.test_sequences
    draws = Draws(self.seed, SPLITS.index(split))
    size_N = draws.between(self.min_size, self.max_size, N)

    def drawn(size_N):
      shape = len(size_N), self.max_size
      digits_NX = draws.below(10, np.prod(shape)).reshape(shape)
      return [row[:size] for row, size in zip(digits_NX, size_N, strict=True)]

    sources = drawn(size_N)
    if split != 'train':
      seen = {source.tobytes() for source in self._sources('train')}
      for _ in range(_TRIES):
        again = [i for i in range(N) if sources[i].tobytes() in seen]
        for i, source in zip(again, drawn(size_N[again]), strict=True):
          sources[i] = source
    return sources
