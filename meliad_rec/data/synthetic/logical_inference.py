r"""Logical inference: relates two formulas of propositional logic.

A document is a pair of formulas. The label of its last token is one of 7
relations:

  START ( a ( and b ) ) END START a END
                                    <

Here the left formula holds in a proper subset of the worlds (assignments of the
variables) in which the right one holds.

Formulas are drawn by the rules of Bowman et al. 2015, to depth 3. Each pair has
its own 4 of the 6 variables. A formula is one of these 4 with probability 5/9,
and otherwise `and` or `or` of two formulas; at depth 3 it is always a variable.
It is negated with probability 1/3. Formulas that hold in all worlds or in none
are not used. The splits are as in Ray Chowdhury and Caragea 2024: formulas in
train have up to 6 operators, and formulas in test have any number.

A formula is stored as the 15 nodes of a binary tree, where the children of node
i are 2 i + 1 and 2 i + 2. A node is a variable from 1 to 6, AND or OR, plus NOT
if it is negated; 0 is an empty node.

Letters of this file: P nodes of a formula, N pairs or formulas, V variables, X
words, but any further axes in `worlds` and `operators`.
"""

from collections.abc import Mapping
import dataclasses
import functools
import itertools

import numpy as np

from meliad_rec.data.documents import check_split
from meliad_rec.data.synthetic import labeled
from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.vocabulary import Words

VARIABLES = 'abcdef'
SYMBOLS = ('(', ')', *VARIABLES, 'and', 'or', 'not')
AND, OR, NOT = 7, 8, 16
NODES = 15
_INNER = 7  # The nodes that have children come first.
# Words of the longest formula: 8 variables and 7 operators, all negated.
LONGEST = 8 + 5 * 7 + 3 * 15

# A set of worlds is a 64-bit number: bit w is world w. Bit v of w is the value
# of variable v in world w.
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
# All choices of 4 of the 6 variables.
_FOURS = np.array(list(itertools.combinations(range(1, 7), 4)), np.uint8)

RELATIONS = '=', '<', '>', '^', '|', 'v', '#'
BINS = 13  # The last bin has the pairs with 12 or more operators.
_BIN = 'bin_'
_CHUNK = 2**16  # Pairs drawn at once.


@dataclasses.dataclass(frozen=True)
class LogicalInference(labeled.WithEnds):
  """The logical inference task.

  Its splits are train, validation, test and bin_0 to bin_12.

  The bin of a pair is the greater number of operators of its two formulas; bin
  12 also has the pairs with more. In each bin, the last 15 % of the pairs drawn
  are in test; the splits bin_0 to bin_12 are the parts of test. The other pairs
  of bins up to `train_operators` are divided: every tenth is in validation, and
  the rest are in train. The other pairs of later bins are not used. Validation
  and test are shuffled, so that their first documents are of all bins.

  No two pairs of a split are the same. No two splits share a pair, except test
  and its parts.

  Attributes:
    pairs: number of pairs to draw; about half of them are duplicates, which are
      dropped.
    train_operators: number of the last bin that has pairs in train.
    seed: seed of the pairs.
    ends: whether formulas and vocabulary have the words START and END.
  """

  pairs: int = 500_000
  train_operators: int = 6
  seed: int = 0
  ends: bool = True

  vocabulary = Words([*RELATIONS, *SYMBOLS, *labeled.ENDS])
  splits = (
    'train',
    'validation',
    'test',
    *(f'{_BIN}{number}' for number in range(BINS)),
  )

  def __post_init__(self):
    name = 'logical_inference.LogicalInference'
    labeled.check_setting(f'{name}.pairs', self.pairs, 1)
    labeled.check_setting(
      f'{name}.train_operators', self.train_operators, 0, BINS - 1
    )
    self._drop_ends()

  def baselines(self, split: str) -> Mapping[str, float]:
    """Returns {name: error rate from 0 to 1} of two trivial predictors.

    `uniform` guesses a random relation. `likeliest` always answers with the
    most common relation in train.
    """
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
    symbol_ids = self.vocabulary.encode(' '.join(SYMBOLS))
    ends_N1 = [np.full((len(n), 1), i, np.uint8) for i in self.end_ids]
    left_NX, right_NX = (
      np.concatenate(
        [*ends_N1[:1], write(tree_PN, symbol_ids), *ends_N1[1:]], 1
      )
      for tree_PN in self._pairs[:, :, n].swapaxes(0, 1)
    )
    tokens_NX = np.concatenate([left_NX, right_NX], 1)
    labels_NX = np.zeros_like(tokens_NX)
    # The last token of each pair, before the trailing zeros.
    last_N = tokens_NX.shape[1] - 1 - (tokens_NX[:, ::-1] > 0).argmax(1)
    labels_NX[np.arange(len(n)), last_N] = self._relation_N[n]
    documents = labeled.from_rows(
      split, tokens_NX, labels_NX, 1, self.vocabulary
    )
    first_lengths = (left_NX > 0).sum(1)
    return dataclasses.replace(documents, first_lengths=first_lengths)

  def _split(self, split: str) -> np.ndarray:
    """Returns the indices of the pairs of a split."""
    check_split(split, self.splits)
    by_bin = [np.flatnonzero(self._bin_N == number) for number in range(BINS)]
    ends = [len(n) * 85 // 100 for n in by_bin]
    tests = [n[end:] for n, end in zip(by_bin, ends, strict=True)]
    parts = [n[:end] for n, end in zip(by_bin, ends, strict=True)]
    for_training = np.concatenate(parts[: self.train_operators + 1])
    in_validation = np.arange(len(for_training)) % 10 == 9
    match split:
      case 'train':
        indices = for_training[~in_validation]
      case 'validation':
        indices = for_training[in_validation]
      case 'test':
        indices = np.concatenate(tests)
      case _:
        indices = tests[int(split.removeprefix(_BIN))]
    if not indices.size:
      raise ValueError(
        f'None of the {self.pairs} pairs drawn is in {split}. Increase '
        'logical_inference.LogicalInference.pairs.'
      )
    if split in ('validation', 'test'):
      return indices[Draws(self.seed, 1).order(len(indices))]
    return indices

  @functools.cached_property
  def _pairs(self) -> np.ndarray:
    """Different pairs in the order drawn: uint8 [15 nodes, 2 formulas, N]."""
    draws, kept, count = Draws(self.seed), [], 0
    while count < self.pairs:
      tree_P2N = draw(draws, _CHUNK)
      world_2N = worlds(tree_P2N)
      # Neither formula is a contradiction or a tautology.
      is_valid_N = ((world_2N != 0) & (world_2N != EVERYWHERE)).all(0)
      kept.append(tree_P2N[..., is_valid_N])
      count += is_valid_N.sum()
    pair_P2N = np.concatenate(kept, 2)[..., : self.pairs]
    rows = np.ascontiguousarray(pair_P2N.transpose(2, 0, 1))
    first_index = {}
    for i, row in enumerate(rows):
      first_index.setdefault(row.tobytes(), i)
    return pair_P2N[..., list(first_index.values())]

  @functools.cached_property
  def _bin_N(self) -> np.ndarray:
    most_N = operators(self._pairs).max(0)
    return np.minimum(most_N, BINS - 1)

  @functools.cached_property
  def _relation_N(self) -> np.ndarray:
    return relation(*worlds(self._pairs))


def relation(left_N: np.ndarray, right_N: np.ndarray) -> np.ndarray:
  """Returns the relation of each left set of worlds to the right: int64 [N].

  The relation is the number, from 1, of the first of these that applies: equal,
  subset, superset, complement, disjoint, covering all worlds together, none of
  these. RELATIONS has their symbols in this order.

  Args:
    left_N: uint64; bit w is 1 if world w is in the set.
    right_N: likewise.
  """
  both_N, either_N = left_N & right_N, left_N | right_N
  tests = [
    left_N == right_N,
    both_N == left_N,
    both_N == right_N,
    (both_N == 0) & (either_N == EVERYWHERE),
    both_N == 0,
    either_N == EVERYWHERE,
  ]
  return np.select(tests, range(1, 7), 7)


def draw(draws: Draws, pairs: int) -> np.ndarray:
  """Draws pairs of formulas: uint8 [15 nodes, 2, pairs].

  Both formulas of a pair are made of the same 4 variables.
  """
  shape = NODES, 2, pairs
  size = NODES * 2 * pairs
  four_N4 = _FOURS[draws.below(len(_FOURS), pairs)]
  which_P2N = draws.below(4, size).reshape(shape)
  tree_P2N = four_N4[np.arange(pairs), which_P2N]
  kind_P2N = draws.below(9, size).reshape(shape)
  kind_P2N[_INNER:] = 8
  tree_P2N[kind_P2N < 4] = OR
  tree_P2N[kind_P2N < 2] = AND
  for i in range(1, NODES):
    tree_P2N[i] *= tree_P2N[(i - 1) // 2] >= AND
  negated_P2N = (draws.below(3, size) == 0).reshape(shape)
  return tree_P2N + NOT * (negated_P2N & (tree_P2N > 0)).astype(np.uint8)


def worlds(tree_PX: np.ndarray) -> np.ndarray:
  """Returns the worlds in which each formula holds: uint64 [...].

  Bit w is 1 if the formula holds in world w.

  Args:
    tree_PX: the nodes of each formula, [15, ...].
  """
  holds_PX = np.empty(tree_PX.shape, np.uint64)
  for i in reversed(range(NODES)):
    kind_X = tree_PX[i] % NOT
    holds_X = _HOLDS_V[np.where(kind_X < AND, kind_X, 0)]
    if i < _INNER:
      left_X, right_X = holds_PX[2 * i + 1], holds_PX[2 * i + 2]
      holds_X = np.where(kind_X == AND, left_X & right_X, holds_X)
      holds_X = np.where(kind_X == OR, left_X | right_X, holds_X)
    holds_PX[i] = np.where(tree_PX[i] >= NOT, ~holds_X, holds_X)
  return holds_PX[0]


def operators(tree_PX: np.ndarray) -> np.ndarray:
  """Returns the number of operators of each formula: int64 [...].

  The operators are `and`, `or` and `not`.

  Args:
    tree_PX: the nodes of each formula, [15, ...].
  """
  return ((tree_PX % NOT >= AND).sum(0) + (tree_PX >= NOT).sum(0)).astype(int)


def write(tree_PN: np.ndarray, ids: np.ndarray) -> np.ndarray:
  """Returns the word ids of N formulas, followed by zeros: uint8 [N, LONGEST].

  Args:
    tree_PN: the nodes of each formula, [15, N].
    ids: ids of SYMBOLS, in that order.
  """
  opens, closes, *variables, and_, or_, not_ = ids
  id_of = np.array([0, *variables, and_, or_], np.uint8)
  size_PN = _sizes(tree_PN)
  begin_PN = np.zeros(tree_PN.shape, np.int64)
  words_NX = np.zeros((tree_PN.shape[1], LONGEST), np.uint8)
  for i, node_N in enumerate(tree_PN):
    n = np.flatnonzero(node_N)
    kind, begin = node_N[n] % NOT, begin_PN[i, n]
    last = begin + size_PN[i, n] - 1
    negated = node_N[n] >= NOT
    m = n[negated]
    # ( not formula )
    words_NX[m, begin[negated]] = opens
    words_NX[m, begin[negated] + 1] = not_
    words_NX[m, last[negated]] = closes
    begin, last = begin + 2 * negated, last - negated
    leaf = kind < AND
    words_NX[n[leaf], begin[leaf]] = id_of[kind[leaf]]
    m, begin, last, kind = (a[~leaf] for a in (n, begin, last, kind))
    if m.size:
      # ( left ( op right ) )
      inner = begin + 1 + size_PN[2 * i + 1, m]
      words_NX[m, begin] = words_NX[m, inner] = opens
      words_NX[m, inner + 1] = id_of[kind]
      words_NX[m, last] = words_NX[m, last - 1] = closes
      begin_PN[2 * i + 1, m], begin_PN[2 * i + 2, m] = begin + 1, inner + 2
  return words_NX


def _sizes(tree_PN):
  """Returns the number of words of the subformula at each node: int64 [P, N].

  The number is 0 at an empty node.
  """
  size_PN = np.zeros(tree_PN.shape, np.int64)
  for i in reversed(range(NODES)):
    node_N = tree_PN[i]
    size_PN[i] = (node_N > 0) + 3 * (node_N >= NOT)
    if i < _INNER:
      inside_N = size_PN[2 * i + 1] + size_PN[2 * i + 2]
      size_PN[i] += (node_N % NOT >= AND) * (4 + inside_N)
  return size_PN
