"""Random formulas of logic, the worlds in which they hold, and their words.

  ( ( not a ) ( or ( b ( and c ) ) ) )

The rules are those of the generator that Bowman et al. 2015 published, to depth
3: a formula is one of 4 stated variables with probability 5/9, else `and` or
`or` of two; at depth 3 it is a variable. It is negated with probability 1/3.

A formula is a column of 15 places of a binary tree; those below place i are
2 i + 1 and 2 i + 2. A place holds 1 to 6, a variable, or AND, or OR, and NOT is
added where it is negated; 0 is nothing.
"""

import itertools

import numpy as np

from meliad_rec.data.generated.draws import Draws

VARIABLES = 'abcdef'
SYMBOLS = ('(', ')', *VARIABLES, 'and', 'or', 'not')
AND, OR, NOT = 7, 8, 16
PLACES = 15
_INNER = 7  # The places that others are below.
# Words of 8 variables and 7 operators, all of them negated.
LONGEST = 8 + 5 * 7 + 3 * 15

# Of 64 worlds, bit w of a number is world w, and bit v of w is variable v.
_WORLDS = 2 ** len(VARIABLES)
EVERYWHERE = np.uint64(2**_WORLDS - 1)
_HOLDS_V = np.array(
  [0]
  + [
    sum(1 << world for world in range(_WORLDS) if world >> variable & 1)
    for variable in range(len(VARIABLES))
  ],
  np.uint64,
)
# 4 of the 6 variables, from 1, in every way.
_FOURS = np.array(list(itertools.combinations(range(1, 7), 4)), np.uint8)


def draw(draws: Draws, pairs: int) -> np.ndarray:
  """uint8 [15, 2, pairs], two formulas each, of the same 4 variables."""
  shape = PLACES, 2, pairs
  size = PLACES * 2 * pairs
  four_N4 = _FOURS[draws.below(len(_FOURS), pairs)]
  which_P2N = draws.below(4, size).reshape(shape)
  made_P2N = four_N4[np.arange(pairs), which_P2N]
  kind_P2N = draws.below(9, size).reshape(shape)
  kind_P2N[_INNER:] = 8
  made_P2N[kind_P2N < 4] = OR
  made_P2N[kind_P2N < 2] = AND
  for place in range(1, PLACES):
    made_P2N[place] *= made_P2N[(place - 1) // 2] >= AND
  negated_P2N = (draws.below(3, size) == 0).reshape(shape)
  return made_P2N + NOT * (negated_P2N & (made_P2N > 0)).astype(np.uint8)


def worlds(made_PX: np.ndarray) -> np.ndarray:
  """uint64 [...], bits of the worlds where formulas [15, ...] hold."""
  holds_PX = np.empty(made_PX.shape, np.uint64)
  for place in reversed(range(PLACES)):
    kind_X = made_PX[place] % NOT
    holds_X = _HOLDS_V[np.where(kind_X < AND, kind_X, 0)]
    if place < _INNER:
      left_X, right_X = holds_PX[2 * place + 1], holds_PX[2 * place + 2]
      holds_X = np.where(kind_X == AND, left_X & right_X, holds_X)
      holds_X = np.where(kind_X == OR, left_X | right_X, holds_X)
    holds_PX[place] = np.where(made_PX[place] >= NOT, ~holds_X, holds_X)
  return holds_PX[0]


def operators(made_PX: np.ndarray) -> np.ndarray:
  """int64 [...], how many `and`, `or` and `not` formulas [15, ...] have."""
  return ((made_PX % NOT >= AND).sum(0) + (made_PX >= NOT).sum(0)).astype(int)


def write(made_PN: np.ndarray, ids: np.ndarray) -> np.ndarray:
  """uint8 [N, LONGEST] words of formulas [15, N], 0 behind the last.

  Args:
    made_PN: formulas.
    ids: of SYMBOLS, in their order.
  """
  opens, closes, *variables, and_, or_, not_ = ids
  id_of = np.array([0, *variables, and_, or_], np.uint8)
  size_PN = _sizes(made_PN)
  at_PN = np.zeros(made_PN.shape, np.int64)
  written_NX = np.zeros((made_PN.shape[1], LONGEST), np.uint8)
  for place, made_N in enumerate(made_PN):
    n = np.flatnonzero(made_N)
    kind, at = made_N[n] % NOT, at_PN[place, n]
    last = at + size_PN[place, n] - 1
    negated = made_N[n] >= NOT
    m = n[negated]
    written_NX[m, at[negated]] = opens
    written_NX[m, at[negated] + 1] = not_
    written_NX[m, last[negated]] = closes
    at, last = at + 2 * negated, last - negated
    leaf = kind < AND
    written_NX[n[leaf], at[leaf]] = id_of[kind[leaf]]
    m, at, last, kind = (some[~leaf] for some in (n, at, last, kind))
    if m.size:
      # ( left ( op right ) )
      middle = at + 1 + size_PN[2 * place + 1, m]
      written_NX[m, at] = written_NX[m, middle] = opens
      written_NX[m, middle + 1] = id_of[kind]
      written_NX[m, last] = written_NX[m, last - 1] = closes
      at_PN[2 * place + 1, m], at_PN[2 * place + 2, m] = at + 1, middle + 2
  return written_NX


def _sizes(made_PN):
  """Words of what is at each place and below it."""
  size_PN = np.zeros(made_PN.shape, np.int64)
  for place in reversed(range(PLACES)):
    made_N = made_PN[place]
    size_PN[place] = (made_N > 0) + 3 * (made_N >= NOT)
    if place < _INNER:
      inside_N = size_PN[2 * place + 1] + size_PN[2 * place + 2]
      size_PN[place] += (made_N % NOT >= AND) * (4 + inside_N)
  return size_PN
