r"""Counting: as many b as a, and then the end.

A sequence of size 3, with its labels below, reads

  a a a b b b
        b b .

A label is the next symbol: another b, or `.` after the last one. The number of
a is drawn uniformly, so the first b cannot be predicted and has no label.

Fan et al. 2020, table 1, train on counting to at most 50 or 1,000, and report
the accuracy, without the rules of the task. These are of the language a^n b^n
of Joulin and Mikolov 2015, who count a sequence as right if all its symbols
that can be predicted are. That is the metric `sequence_accuracy`. The accuracy
of single labels says little: always b is right at 98 % of the labels at size
50, and in no sequence.

Letters of this file: N sequences, T tokens.
"""

import dataclasses

import numpy as np

from meliad_rec.data.synthetic.by_size import BySize
from meliad_rec.data.synthetic.by_size import Sizes
from meliad_rec.data.vocabulary import Words


@dataclasses.dataclass(frozen=True)
class Counting(BySize):
  """Counting. The size is the number to count to, half of the tokens.

  Attributes:
    sequences, min_size, max_size, test_sizes, test_sequences, seed: see BySize.
  """

  sequences: int = 20_000
  min_size: int = 1
  max_size: int = 50
  test_sizes: Sizes = (50, 100, 200)

  vocabulary = Words(['a', 'b', '.'])

  def largest(self, size):
    return 2 * size

  def draw(self, size_N, draws):
    place_T, size_N1 = np.arange(2 * size_N.max()), size_N[:, None]
    a, b, end = self.vocabulary.encode('a b .')
    real_NT = place_T < 2 * size_N1
    tokens_NT = np.where(place_T < size_N1, a, b)
    labels_NT = np.where(place_T < 2 * size_N1 - 1, b, end)
    labels_NT *= place_T >= size_N1
    return tokens_NT * real_NT, labels_NT * real_NT

  def guess(self):
    return 0.5

  def baselines(self, split):
    """Returns {name: error rate from 0 to 1} of two trivial predictors.

    `uniform` guesses b or the end, and `likeliest` always answers b.
    """
    labels = self.documents(split).labels
    ends = labels == self.vocabulary.encode('.')
    return super().baselines(split) | {
      'likeliest': float(ends.sum() / (labels > 0).sum())
    }
