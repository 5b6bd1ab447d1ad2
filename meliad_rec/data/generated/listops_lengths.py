"""Random expressions of ListOps of stated lengths, without any thrown away.

Of a thousand words are about one in 100,000 expressions, so to draw until one
is long enough takes hours. Here the length is drawn first, then how many
arguments share it, then how long each of those is, and so on: by the exact
probabilities, which convolutions give, of the very expressions that `grow` in
listops_trees.py makes.
"""

import numpy as np

from meliad_rec.data.generated.draws import Draws
from meliad_rec.data.generated.listops_trees import Level
from meliad_rec.data.generated.listops_trees import level

_AROUND = 2  # An operator and its bracket.


class Lengths:
  """How likely each length is, and expressions of it.

  Args:
    max_args: as of `grow`.
    max_depth: as of `grow`.
    longest: the greatest length that is ever asked for, in words.
  """

  def __init__(self, max_args: int, max_depth: int, longest: int):
    self._max_args = max_args
    digit_X = np.zeros(longest + 1)
    digit_X[1] = 1
    # By depth, the last first: the share of expressions of X words, and of so
    # many words in k expressions one behind the other, [k, X].
    shares, behind = [digit_X], []
    for _ in range(max_depth - 1):
      behind.append(_powers(shares[-1], max_args))
      operator_X = np.zeros(longest + 1)
      operator_X[_AROUND:] = behind[-1][2:].mean(0)[:-_AROUND]
      shares.append((3 * digit_X + operator_X) / 4)
    self._shares, self._behind = shares[::-1], behind[::-1]

  def share(self, shortest: int, longest: int) -> float:
    """How many of all expressions have from the one to the other length."""
    return float(self._shares[0][shortest : longest + 1].sum())

  def grow(
    self, draws: Draws, count: int, shortest: int, longest: int
  ) -> list[Level]:
    """As many expressions, of lengths from the one to the other, there are."""
    share_X = self._shares[0].copy()
    share_X[:shortest] = share_X[longest + 1 :] = 0
    length_N = _pick(draws, share_X[None], np.zeros(count, np.int64))
    levels = []
    for depth in range(len(self._shares)):
      levels.append(level(draws, length_N > 1, self._max_args))
      operators = np.flatnonzero(length_N > 1)
      if not operators.size:
        break
      arguments_N = self._arguments(draws, depth, length_N[operators])
      levels[-1].arguments_N[operators] = arguments_N
      length_N = self._split(draws, depth, length_N[operators], arguments_N)
    return levels

  def _arguments(self, draws, depth, length_N):
    """How many arguments operators of these lengths have."""
    lengths, row_N = np.unique(length_N, return_inverse=True)
    likely_RK = self._behind[depth][2:, lengths - _AROUND].T
    return 2 + _pick(draws, likely_RK, row_N)

  def _split(self, draws, depth, length_N, arguments_N):
    """The lengths of all arguments, in order."""
    share_X, behind_KX = self._shares[depth + 1], self._behind[depth]
    split_C = np.empty(arguments_N.sum(), np.int64)
    place_N = np.cumsum(arguments_N) - arguments_N
    left_N = length_N - _AROUND
    for k in range(self._max_args, 1, -1):
      here = np.flatnonzero(arguments_N >= k)
      if not here.size:
        continue
      # Of k arguments the first one; the others share what then is left.
      lefts, row_N = np.unique(left_N[here], return_inverse=True)
      first_X = np.arange(lefts[-1] + 1)
      rest_RX = lefts[:, None] - first_X
      others_RX = np.where(rest_RX < 0, 0, behind_KX[k - 1][rest_RX])
      first_N = _pick(draws, share_X[first_X] * others_RX, row_N)
      split_C[place_N[here]] = first_N
      left_N[here] -= first_N
      place_N[here] += 1
    split_C[place_N] = left_N
    return split_C


def _powers(share_X, most):
  """Shares of X words in 0, 1, ... and `most` expressions, [most + 1, X]."""
  powers = [np.zeros_like(share_X), share_X]
  powers[0][0] = 1
  for _ in range(most - 1):
    powers.append(np.convolve(powers[-1], share_X)[: len(share_X)])
  return np.stack(powers)


def _pick(draws, likely_RX, row_N):
  """A column for each, as likely as in its row, which sums to more than 0."""
  upto_RX = np.cumsum(likely_RX, 1)
  upto_RX /= upto_RX[:, -1:]
  # One search for all, in rows one behind the other.
  at_N = row_N + draws.between_0_and_1(len(row_N))
  upto_RX += np.arange(len(upto_RX))[:, None]
  found_N = np.searchsorted(upto_RX.ravel(), at_N)
  return found_N - row_N * likely_RX.shape[1]
