"""Random expressions of ListOps as trees, their words and their values.

  [MAX 2 9 [MIN 4 7 ] 0 ]      has the value 9

The rules are taken from the generator of Nangia and Bowman (2018). With
probability 1/4 an expression is an operator, and otherwise a digit. An operator
has from 2 to a maximum number of arguments, all numbers being equally likely.
Each argument is again an expression. At the greatest depth all expressions are
digits. MED is the median, rounded down, and SM the sum modulo 10.

Trees are stored level by level. The expressions of a level are in the order of
their parents, which are in the level before; the last level has only digits.

`grow` draws expressions of any length, and `Lengths.grow` draws expressions of
given lengths. Only about one expression in 100,000 has a thousand words or
more, so drawing until an expression is long enough would take hours. `Lengths`
draws the length first, then the number of arguments among which it is divided,
then the length of each argument, and so on, from the exact distribution of the
expressions that `grow` draws.

Letters of this file: N expressions of a level, C their arguments, X lengths in
words, K numbers of arguments, R rows of a table.
"""

from collections.abc import Callable
from collections.abc import Container
import itertools
import math
from typing import NamedTuple

import numpy as np

from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.synthetic.labeled import ENDS
from meliad_rec.data.vocabulary import Words

DIGITS = '0123456789'
OPERATORS = '[MIN', '[MAX', '[MED', '[SM'
VOCABULARY = Words([*DIGITS, *OPERATORS, ']', *ENDS])
_DIGIT, _OPERATOR, _CLOSE = VOCABULARY.encode('0 [MIN ]').tolist()
_BRACKETS = 2  # Words of an operator besides its arguments: itself and `]`.
# `distinct` gives up if a smaller share of the expressions drawn is new.
_FEW_NEW = 0.01


class Level(NamedTuple):
  """The expressions of one depth.

  Attributes:
    word_N: id of the first word of each expression: an operator or a digit.
    arguments_N: number of arguments of each expression; 0 for a digit.
  """

  word_N: np.ndarray
  arguments_N: np.ndarray


class Expressions(NamedTuple):
  """Expressions as ids, concatenated.

  Attributes:
    tokens: uint8 ids of all expressions.
    starts: [expressions + 1], where each expression begins in `tokens`, and
      where the last one ends.
    values_N: the value of each expression, 0 to 9.
  """

  tokens: np.ndarray
  starts: np.ndarray
  values_N: np.ndarray


def grow(
  draws: Draws, count: int, max_args: int, max_depth: int
) -> list[Level]:
  """Draws random expressions of any length.

  Args:
    draws: the random numbers.
    count: number of expressions.
    max_args: maximum number of arguments of an operator, at least 2.
    max_depth: greatest depth, at which all expressions are digits; the first
      level has depth 1.

  Returns:
    The levels of the expressions, from the first.
  """
  levels = []
  for depth in range(1, max_depth + 1):
    is_operator_N = draws.below(4, count) == 0
    is_operator_N &= depth < max_depth
    levels.append(_draw_level(draws, is_operator_N, max_args))
    count = levels[-1].arguments_N.sum()
    if not count:
      break
  return levels


def mean_length(max_args: int, max_depth: int) -> float:
  """Returns the mean number of words of the expressions that `grow` draws."""
  # Mean number of arguments of an expression above the last level.
  arguments = (2 + max_args) / 2 / 4
  try:
    levels = [arguments**depth for depth in range(max_depth)]
  except OverflowError:
    return math.inf
  return sum(levels) + sum(levels[:-1]) / 4  # Closing brackets are words too.


def _draw_level(
  draws: Draws, is_operator_N: np.ndarray, max_args: int
) -> Level:
  N = len(is_operator_N)
  arguments_N = 2 + draws.below(max_args - 1, N)
  choices_N = np.where(is_operator_N, len(OPERATORS), len(DIGITS))
  first_N = np.where(is_operator_N, _OPERATOR, _DIGIT)
  return Level(first_N + draws.below(choices_N, N), is_operator_N * arguments_N)


def write(levels: list[Level]) -> Expressions:
  """Returns the ids and values of the expressions of the first level."""
  sizes, value_N = [np.zeros(0, np.int64)], np.zeros(0, np.int64)
  for word_N, arguments_N in reversed(levels):
    operators = np.flatnonzero(arguments_N)
    argument_values = value_N
    size_N, value_N = np.ones_like(word_N), word_N - _DIGIT
    if operators.size:
      arguments = arguments_N[operators]
      first = np.cumsum(arguments) - arguments
      size_N[operators] = _BRACKETS + np.add.reduceat(sizes[-1], first)
      value_N[operators] = _evaluate(
        word_N[operators] - _OPERATOR, arguments, first, argument_values
      )
    sizes.append(size_N)
  starts = np.concatenate([[0], np.cumsum(sizes[-1])])
  return Expressions(_words(levels, sizes[::-1], starts), starts, value_N)


def _evaluate(operator_N, arguments_N, first_N, value_C):
  """Returns the value of each operator: int64 [N], 0 to 9.

  Args:
    operator_N: index of each operator in OPERATORS.
    arguments_N: number of arguments of each operator.
    first_N: index of the first argument of each operator in `value_C`.
    value_C: values of the arguments of all operators, in order.
  """
  sorted_C = np.repeat(10 * np.arange(len(first_N)), arguments_N) + value_C
  sorted_C = np.sort(sorted_C) % 10  # Sorted within each operator.
  below_N = sorted_C[first_N + (arguments_N - 1) // 2]
  above_N = sorted_C[first_N + arguments_N // 2]
  return np.choose(
    operator_N,
    [
      sorted_C[first_N],
      sorted_C[first_N + arguments_N - 1],
      (below_N + above_N) // 2,
      np.add.reduceat(value_C, first_N) % 10,
    ],
  )


def _words(levels, sizes, starts):
  """Returns the ids of the expressions of the first level, concatenated.

  The words of each level fill the gaps that the level before leaves for its
  arguments.

  Args:
    levels: the levels, from the first.
    sizes: for each level, the number of words of each of its expressions.
    starts: where each expression of the first level begins in the result.
  """
  tokens = np.empty(starts[-1], np.uint8)
  begin_N = starts[:-1]
  for (word_N, arguments_N), size_N, argument_size_N in zip(
    levels, sizes[:-1], sizes[1:], strict=True
  ):
    tokens[begin_N] = word_N
    operators = np.flatnonzero(arguments_N)
    tokens[(begin_N + size_N)[operators] - 1] = _CLOSE
    arguments = arguments_N[operators]
    first = np.cumsum(arguments) - arguments
    before_N = np.cumsum(argument_size_N) - argument_size_N
    if operators.size:
      shift = begin_N[operators] + 1 - before_N[first]
      begin_N = before_N + np.repeat(shift, arguments)
  return tokens


def distinct(
  draw: Callable[[], list[Level]],
  count: int,
  settings: str,
  excluded: Container[bytes] = (),
) -> dict[bytes, int]:
  """Returns `count` different expressions and their values, in order drawn.

  Args:
    draw: returns the levels of any number of new expressions at each call.
    count: number of expressions needed.
    settings: names of the settings that limit the number of different
      expressions, for the error message.
    excluded: expressions to leave out, as bytes like those returned.

  Returns:
    {ids of an expression, as bytes: its value}.

  Raises:
    ValueError: too few different expressions were found.
  """
  found = {}
  while len(found) < count:
    count_before = len(found)
    tokens, starts, values_N = write(draw())
    text, starts = tokens.tobytes(), starts.tolist()
    spans = zip(starts, starts[1:], values_N.tolist(), strict=False)
    for begin, end, value in spans:
      expression = text[begin:end]
      if expression not in excluded:
        found[expression] = value
    if len(found) - count_before < _FEW_NEW * len(values_N):
      break
  if len(found) < count:
    raise ValueError(
      f'{count} different expressions are needed, but there are hardly more '
      f'than {len(found)}. Increase {settings}.'
    )
  return dict(itertools.islice(found.items(), count))


class Lengths:
  """Draws expressions of given lengths.

  They are distributed like the expressions of these lengths among those that
  the function `grow` draws.

  Args:
    max_args: as in the function `grow`.
    max_depth: as in the function `grow`.
    longest: maximum length, in words, that may be passed to the methods.
  """

  def __init__(self, max_args: int, max_depth: int, longest: int):
    self._max_args = max_args
    digit_X = np.zeros(longest + 1)
    digit_X[1] = 1
    # From the last depth to the first. one[i][X]: probability that an
    # expression has X words. several[i][k, X]: probability that k expressions
    # together have X words.
    one, several = [digit_X], []
    for _ in range(max_depth - 1):
      several.append(_powers(one[-1], max_args))
      operator_X = np.zeros(longest + 1)
      operator_X[_BRACKETS:] = several[-1][2:].mean(0)[:-_BRACKETS]
      one.append((3 * digit_X + operator_X) / 4)
    self._one, self._several = one[::-1], several[::-1]

  def share(self, shortest: int, longest: int) -> float:
    """Returns the probability of an expression of these lengths.

    It is the share of the expressions drawn by the function `grow` that have at
    least `shortest` and at most `longest` words.
    """
    return float(self._one[0][shortest : longest + 1].sum())

  def grow(
    self, draws: Draws, count: int, shortest: int, longest: int
  ) -> list[Level]:
    """Draws expressions.

    Args:
      draws: the random numbers.
      count: number of expressions.
      shortest: least number of words of an expression.
      longest: greatest number of words of an expression.

    Returns:
      The levels of the expressions, from the first.
    """
    likely_X = self._one[0].copy()
    likely_X[:shortest] = likely_X[longest + 1 :] = 0
    length_N = _pick(draws, likely_X[None], np.zeros(count, np.int64))
    levels = []
    for depth in range(len(self._one)):
      levels.append(_draw_level(draws, length_N > 1, self._max_args))
      operators = np.flatnonzero(length_N > 1)
      if not operators.size:
        break
      arguments_N = self._draw_arguments(draws, depth, length_N[operators])
      levels[-1].arguments_N[operators] = arguments_N
      length_N = self._split(draws, depth, length_N[operators], arguments_N)
    return levels

  def _draw_arguments(self, draws, depth, length_N):
    """Draws the number of arguments of each operator: int64 [N].

    Args:
      draws: the random numbers.
      depth: depth of the operators, counted from 0.
      length_N: number of words of each operator with its arguments.
    """
    lengths, row_N = np.unique(length_N, return_inverse=True)
    likely_RK = self._several[depth][2:, lengths - _BRACKETS].T
    return 2 + _pick(draws, likely_RK, row_N)

  def _split(self, draws, depth, length_N, arguments_N):
    """Draws the number of words of each argument, in order: int64 [C].

    Args:
      draws: the random numbers.
      depth: depth of the operators, counted from 0.
      length_N: number of words of each operator with its arguments.
      arguments_N: number of arguments of each operator.
    """
    one_X, several_KX = self._one[depth + 1], self._several[depth]
    length_C = np.empty(arguments_N.sum(), np.int64)
    next_N = np.cumsum(arguments_N) - arguments_N
    left_N = length_N - _BRACKETS
    for k in range(self._max_args, 1, -1):
      n = np.flatnonzero(arguments_N >= k)
      if not n.size:
        continue
      # Draws the first of the k remaining arguments; the others share the rest.
      lefts, row_N = np.unique(left_N[n], return_inverse=True)
      first_X = np.arange(lefts[-1] + 1)
      rest_RX = lefts[:, None] - first_X
      others_RX = np.where(rest_RX < 0, 0, several_KX[k - 1][rest_RX])
      first_N = _pick(draws, one_X[first_X] * others_RX, row_N)
      length_C[next_N[n]] = first_N
      left_N[n] -= first_N
      next_N[n] += 1
    length_C[next_N] = left_N
    return length_C


def _powers(one_X, most):
  """Returns the distribution of the total length of several expressions.

  Args:
    one_X: entry x is the probability that one expression has x words.
    most: maximum number of expressions.

  Returns:
    [most + 1, X]; entry k, x is the probability that k expressions together
    have x words.
  """
  powers = [np.zeros_like(one_X), one_X]
  powers[0][0] = 1
  for _ in range(most - 1):
    powers.append(np.convolve(powers[-1], one_X)[: len(one_X)])
  return np.stack(powers)


def _pick(draws, likely_RX, row_N):
  """Draws N columns of a table; returns their indices, int64 [N].

  Args:
    draws: the random numbers.
    likely_RX: the table. The probability of a column is proportional to its
      number in the row; a row need not sum to 1.
    row_N: index of the row from which each column is drawn.
  """
  upto_RX = np.cumsum(likely_RX, 1)
  upto_RX /= upto_RX[:, -1:]
  # A single search: row r covers the interval from r to r + 1.
  point_N = row_N + draws.between_0_and_1(len(row_N))
  upto_RX += np.arange(len(upto_RX))[:, None]
  index_N = np.searchsorted(upto_RX.ravel(), point_N)
  return index_N - row_N * likely_RX.shape[1]
