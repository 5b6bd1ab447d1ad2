r"""Logical inference: what does one formula say about another?

A document is two formulas, and one of 7 relations is the label of its last
token:

  START ( a ( and b ) ) END START a END
                                    <

Here the left one holds in some of the worlds alone in which the right one does.

Drawn anew by the rules of Bowman et al. 2015. Splits as in Ray Chowdhury and
Caragea 2024: pairs of up to 6 operators are trained on, and those of up to 12
and more are tested, by the number of operators.

Random formulas of logic, the worlds in which they hold, and their words.

  ( ( not a ) ( or ( b ( and c ) ) ) )

The rules are those of the generator that Bowman et al. 2015 published, to depth
3: a formula is one of 4 stated variables with probability 5/9, else `and` or
`or` of two; at depth 3 it is a variable. It is negated with probability 1/3.

A formula is a column of 15 places of a binary tree; those below place i are
2 i + 1 and 2 i + 2. A place holds 1 to 6, a variable, or AND, or OR, and NOT is
added where it is negated; 0 is nothing.
"""

from collections.abc import Mapping
import dataclasses
import functools
import itertools

import numpy as np

from meliad_rec.data.documents import Documents
from meliad_rec.data.synthetic import labelled
from meliad_rec.data.synthetic.labelled import Draws
from meliad_rec.data.vocabulary import Words

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


RELATIONS = '=', '<', '>', '^', '|', 'v', '#'
BINS = 13  # The last one has all of 12 operators or more.
_BIN = 'bin_'
_ENDS = 'START', 'END'
_DRAWN = 2**16  # Pairs at once.


@dataclasses.dataclass(frozen=True)
class LogicalInference:
  """Splits: train, validation, test, and bin_0 to bin_12, the parts of test.

  The bin of a pair is the number of operators in the formula that has more. Of
  each bin the first 85 % drawn are to be trained on, the rest is tested;
  validation is every tenth pair of what is to be trained on. Its pairs, and
  those of test, are shuffled, so that the first are of every bin. No two pairs,
  of whichever splits, are the same, but that bins are parts of test.

  Attributes:
    pairs: that are drawn; about half of them are the same as one before.
    train_operators: the last bin that is trained on.
    seed: of the pairs.
    ends: whether formulas, and the vocabulary, have START and END.
  """

  pairs: int = 500_000
  train_operators: int = 6
  seed: int = 0
  ends: bool = True

  vocabulary = Words([*RELATIONS, *SYMBOLS, *_ENDS])
  splits = (
    'train',
    'validation',
    'test',
    *(f'{_BIN}{place}' for place in range(BINS)),
  )

  def __post_init__(self):
    name = 'logical_inference.LogicalInference'
    labelled.check(f'{name}.pairs', self.pairs, 1)
    most = BINS - 1
    labelled.check(f'{name}.train_operators', self.train_operators, 0, most)
    if not self.ends:
      words = Words(self.vocabulary.words[: -len(_ENDS)])
      object.__setattr__(self, 'vocabulary', words)  # It is frozen.

  def documents(self, split: str) -> Documents:
    """All documents of a split, one for each pair."""
    if split not in self._made:
      self._made[split] = self._documents(split)
    return self._made[split]

  def baselines(self, split: str) -> Mapping[str, float]:
    """What a guess gets wrong, and the likeliest relation of train."""
    train_N, relation_N = (
      self._relation_N[self._split(name)] for name in ('train', split)
    )
    likeliest = np.bincount(train_N).argmax()
    return {
      'uniform': 1 - 1 / len(RELATIONS),
      'likeliest': float((relation_N != likeliest).mean()),
    }

  def _documents(self, split):
    n = self._split(split)
    words = self.vocabulary.encode(' '.join(SYMBOLS))
    around = ' '.join(_ENDS) if self.ends else ''
    ends = self.vocabulary.encode(around).astype(np.uint8)
    ends_N1 = [np.full((len(n), 1), end) for end in ends]
    left_NX, right_NX = (
      np.concatenate([*ends_N1[:1], write(made_PN, words), *ends_N1[1:]], 1)
      for made_PN in self._pairs[:, :, n].swapaxes(0, 1)
    )
    tokens_NX = np.concatenate([left_NX, right_NX], 1)
    labels_NX = np.zeros_like(tokens_NX)
    # The last token of each pair: 0s behind it are none.
    last_N = tokens_NX.shape[1] - 1 - (tokens_NX[:, ::-1] > 0).argmax(1)
    labels_NX[np.arange(len(n)), last_N] = self._relation_N[n]
    made = labelled.documents(split, tokens_NX, labels_NX, 1, self.vocabulary)
    return dataclasses.replace(made, middles=(left_NX > 0).sum(1))

  @functools.cached_property
  def _made(self) -> dict[str, Documents]:
    return {}

  def _split(self, split: str) -> np.ndarray:
    """Which of all pairs are a split's."""
    if split not in self.splits:
      raise ValueError(
        f'This task has no split {split!r}; it has {", ".join(self.splits)}.'
      )
    by_bin = [np.flatnonzero(self._bin_N == place) for place in range(BINS)]
    trained = [len(n) * 85 // 100 for n in by_bin]
    tests = [n[end:] for n, end in zip(by_bin, trained, strict=True)]
    parts = [n[:end] for n, end in zip(by_bin, trained, strict=True)]
    to_train = np.concatenate(parts[: self.train_operators + 1])
    in_validation = np.arange(len(to_train)) % 10 == 9
    match split:
      case 'train':
        chosen = to_train[~in_validation]
      case 'validation':
        chosen = to_train[in_validation]
      case 'test':
        chosen = np.concatenate(tests)
      case _:
        chosen = tests[int(split.removeprefix(_BIN))]
    if not chosen.size:
      raise ValueError(
        f'None of {self.pairs} drawn pairs is one of {split}; set '
        'logical_inference.LogicalInference.pairs higher.'
      )
    if split in ('validation', 'test'):
      return chosen[Draws(self.seed, 1).order(len(chosen))]
    return chosen

  @functools.cached_property
  def _pairs(self) -> np.ndarray:
    """uint8 [15, 2, N], different pairs of formulas, in the order drawn."""
    draws, kept, count = Draws(self.seed), [], 0
    while count < self.pairs:
      made_P2N = draw(draws, _DRAWN)
      holds_2N = worlds(made_P2N)
      # Neither holds nowhere, or everywhere.
      fit_N = ((holds_2N != 0) & (holds_2N != EVERYWHERE)).all(0)
      kept.append(made_P2N[..., fit_N])
      count += fit_N.sum()
    drawn_P2N = np.concatenate(kept, 2)[..., : self.pairs]
    rows = np.ascontiguousarray(drawn_P2N.transpose(2, 0, 1))
    first = {}
    for place, row in enumerate(rows):
      first.setdefault(row.tobytes(), place)
    return drawn_P2N[..., list(first.values())]

  @functools.cached_property
  def _bin_N(self) -> np.ndarray:
    most_N = operators(self._pairs).max(0)
    return np.minimum(most_N, BINS - 1)

  @functools.cached_property
  def _relation_N(self) -> np.ndarray:
    return relation(*worlds(self._pairs))


def relation(left_N: np.ndarray, right_N: np.ndarray) -> np.ndarray:
  """int64 [N], from 1, which of RELATIONS holds between sets of worlds.

  Equal, in the right one, around it, its opposite, apart from it, with it all
  there is, or none of these; the first of them that is so.
  """
  together_N, either_N = left_N & right_N, left_N | right_N
  tests = [
    left_N == right_N,
    together_N == left_N,
    together_N == right_N,
    (together_N == 0) & (either_N == EVERYWHERE),
    together_N == 0,
    either_N == EVERYWHERE,
  ]
  return np.select(tests, range(1, 7), 7)
