r"""Copy and reverse: repeats a sequence of digits, forward or backward.

Copying four digits, a sequence with its labels below reads

  3 1 4 1 = 3 1 4
          3 1 4 1

A label is the next digit of the copy. A model that has all labels of a sequence
right also generates the whole copy. Fan et al. 2020, section 4.1.1, train on
these two tasks at length 40, and test at 400.

Letters of this file: N sequences, T tokens, X digits.
"""

import dataclasses

import numpy as np

from meliad_rec.data.synthetic.by_size import BySize
from meliad_rec.data.synthetic.by_size import Sizes
from meliad_rec.data.vocabulary import Words


@dataclasses.dataclass(frozen=True)
class Copying(BySize):
  """Copy or reverse. The size is the number of digits.

  Attributes:
    backward: whether the copy begins with the last digit.
    sequences, min_size, max_size, test_sizes, test_sequences, seed: see BySize.
  """

  min_size: int = 40
  max_size: int = 40
  test_sizes: Sizes = (80, 160, 400)
  backward: bool = False

  vocabulary = Words([*'0123456789', '='])

  def draw(self, size_N, draws):
    N, X = len(size_N), int(size_N.max())
    zero, equals = self.vocabulary.encode('0 =')
    digits_NX = zero + draws.below(10, N * X).reshape(N, X)
    place_T, size_N1 = np.arange(2 * X), size_N[:, None]
    # How many digits have been copied before each token.
    copied_NT = np.maximum(place_T - size_N1 - 1, -2)
    first_NT = np.take(digits_NX, np.minimum(place_T, X - 1), 1)
    copy_NX = digits_NX
    if self.backward:
      back_NX = np.maximum(size_N1 - 1 - np.arange(X), 0)
      copy_NX = np.take_along_axis(digits_NX, back_NX, 1)
    copy = lambda at_NT: np.take_along_axis(copy_NX, at_NT.clip(0, X - 1), 1)
    real_NT = place_T < 2 * size_N1
    tokens_NT = np.select(
      [copied_NT < -1, copied_NT == -1], [first_NT, equals], copy(copied_NT)
    )
    labels_NT = np.where(copied_NT < -1, 0, copy(copied_NT + 1))
    return tokens_NT * real_NT, labels_NT * real_NT

  def guess(self):
    return 0.9
