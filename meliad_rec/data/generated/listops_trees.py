r"""Random expressions of ListOps, their words, and what they come to.

  [MAX 2 9 [MIN 4 7 ] 0 ]      is 9

The rules are those of the generator that Nangia and Bowman 2018 published: an
expression is with probability 1/4 an operator of 2 or more arguments, which
are expressions, and else a digit; below a stated depth all are digits. MED is
the median, rounded down, and SM the sum modulo 10.

Trees lie level by level: those of a level side by side, in the order of their
parents, which are in the level before; the last level has digits alone.
"""

from collections.abc import Callable
from collections.abc import Container
import itertools
import math
from typing import NamedTuple

import numpy as np

from meliad_rec.data.generated.draws import Draws
from meliad_rec.data.word_vocabulary import Words

DIGITS = '0123456789'
OPERATORS = '[MIN', '[MAX', '[MED', '[SM'
START, END = 'START', 'END'
VOCABULARY = Words([*DIGITS, *OPERATORS, ']', START, END])
_DIGIT, _OPERATOR, _CLOSE = VOCABULARY.encode('0 [MIN ]').tolist()

_HARDLY = 0.01  # New ones among those drawn.


class Level(NamedTuple):
  """Expressions of one depth: the id of the first word of each, [N], and how
  many arguments it has, [N]; 0: it is a digit."""

  word_N: np.ndarray
  arguments_N: np.ndarray


class Texts(NamedTuple):
  """Expressions as ids, uint8, one behind the other.

  `starts`, [expressions + 1], is where each begins, `values_N` from 0 to 9 what
  it comes to.
  """

  tokens: np.ndarray
  starts: np.ndarray
  values_N: np.ndarray


def grow(
  draws: Draws, count: int, max_args: int, max_depth: int
) -> list[Level]:
  """Random expressions.

  Args:
    draws: where they come from.
    count: of expressions.
    max_args: most arguments of an operator, at least 2.
    max_depth: of the last level, which has digits only; the first is 1.
  """
  levels = []
  for depth in range(1, max_depth + 1):
    operators = draws.below(4, count) == 0
    levels.append(level(draws, operators & (depth < max_depth), max_args))
    count = levels[-1].arguments_N.sum()
    if not count:
      break
  return levels


def mean_length(max_args: int, max_depth: int) -> float:
  """Words of an expression as `grow` draws it, in the mean."""
  arguments = (2 + max_args) / 2 / 4  # Of an expression above the last depth.
  try:
    levels = [arguments**depth for depth in range(max_depth)]
  except OverflowError:
    return math.inf
  return sum(levels) + sum(levels[:-1]) / 4  # The brackets that close.


def level(draws: Draws, operators_N: np.ndarray, max_args: int) -> Level:
  """Expressions that begin with any operator where so told, or any digit."""
  N = len(operators_N)
  arguments_N = 2 + draws.below(max_args - 1, N)
  ends_N = np.where(operators_N, len(OPERATORS), len(DIGITS))
  firsts_N = np.where(operators_N, _OPERATOR, _DIGIT)
  return Level(firsts_N + draws.below(ends_N, N), operators_N * arguments_N)


def write(levels: list[Level]) -> Texts:
  """The expressions of the first level, with all that is in them."""
  sizes, value_N = [np.zeros(0, np.int64)], np.zeros(0, np.int64)
  for word_N, arguments_N in reversed(levels):
    operators = np.flatnonzero(arguments_N)
    size_N, inner_N, value_N = np.ones_like(word_N), value_N, word_N - _DIGIT
    if operators.size:
      arguments = arguments_N[operators]
      first = np.cumsum(arguments) - arguments
      size_N[operators] = 2 + np.add.reduceat(sizes[-1], first)
      value_N[operators] = _results(
        word_N[operators] - _OPERATOR, arguments, first, inner_N
      )
    sizes.append(size_N)
  starts = np.concatenate([[0], np.cumsum(sizes[-1])])
  return Texts(_place(levels, sizes[::-1], starts), starts, value_N)


def _results(operator_N, arguments_N, first_N, value_C):
  """What operators give of the values of all their arguments, in order."""
  sorted_C = np.repeat(10 * np.arange(len(first_N)), arguments_N) + value_C
  sorted_C = np.sort(sorted_C) % 10  # Among the arguments of each.
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


def _place(levels, sizes, starts):
  """Ids of all, each level written where the one before leaves room."""
  tokens = np.empty(starts[-1], np.uint8)
  at_N = starts[:-1]
  for (word_N, arguments_N), size_N, inner_N in zip(
    levels, sizes[:-1], sizes[1:], strict=True
  ):
    tokens[at_N] = word_N
    operators = np.flatnonzero(arguments_N)
    tokens[(at_N + size_N)[operators] - 1] = _CLOSE
    arguments = arguments_N[operators]
    first = np.cumsum(arguments) - arguments
    before_N = np.cumsum(inner_N) - inner_N
    if operators.size:
      inside = at_N[operators] + 1 - before_N[first]
      at_N = before_N + np.repeat(inside, arguments)
  return tokens


def distinct(
  grow: Callable[[], list[Level]],
  count: int,
  how: str,
  taken: Container[bytes] = (),
) -> dict[bytes, int]:
  """As many expressions, no two the same, and their values, in order drawn.

  Args:
    grow: some expressions, others at each call.
    count: of expressions wanted.
    how: which settings give more, for the error.
    taken: expressions that are left out.

  Returns:
    From ids, a byte each, to the value.

  Raises:
    ValueError: there are hardly so many.
  """
  found = {}
  while len(found) < count:
    before = len(found)
    tokens, starts, values_N = write(grow())
    together, starts = tokens.tobytes(), starts.tolist()
    for begin, end, value in zip(
      starts, starts[1:], values_N.tolist(), strict=False
    ):
      text = together[begin:end]
      if text not in taken:
        found[text] = value
    if len(found) - before < _HARDLY * len(values_N):
      break
  if len(found) < count:
    raise ValueError(
      f'{count} different expressions are needed, and there are hardly more '
      f'than {len(found)}. Set {how} higher.'
    )
  return dict(itertools.islice(found.items(), count))


def nesting(tokens: np.ndarray) -> int:
  """Operators around its innermost digit: the depth of an expression's ids.

  START and END do not count.
  """
  opens = (tokens >= _OPERATOR) & (tokens < _CLOSE)
  closes = tokens == _CLOSE
  depth = np.cumsum(opens.astype(int) - closes)
  return int(depth.max(initial=0))
