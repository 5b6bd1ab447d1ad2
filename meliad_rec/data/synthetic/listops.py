r"""ListOps: what does an expression of minima, maxima, medians and sums give?

An expression is a document; a value, 0 to 9, is the label of its last token:

  START [MAX 2 9 [MIN 4 7 ] 0 ] END
                                9

Drawn anew by the rules of Nangia and Bowman 2018, whose expressions are all
different, so that short ones are rarer than they are drawn. Splits as in Ray
Chowdhury and Caragea 2024: validation is of the first 1,000 lines to train on;
tests are of greater lengths, of more arguments, and as in the Long Range Arena
(Tay et al. 2021). Unlike theirs, which is all 1,000, validation is without the
lines of more than 100 words, as train is: 891 remain, since a segment that
holds those of train holds no longer ones. It is the easier for that; test is
not cut.

Random expressions of ListOps, their words, and what they come to.

  [MAX 2 9 [MIN 4 7 ] 0 ]      is 9

The rules are those of the generator that Nangia and Bowman 2018 published: an
expression is with probability 1/4 an operator of 2 or more arguments, which
are expressions, and else a digit; below a stated depth all are digits. MED is
the median, rounded down, and SM the sum modulo 10.

Trees lie level by level: those of a level side by side, in the order of their
parents, which are in the level before; the last level has digits alone.

Random expressions of ListOps of stated lengths, without any thrown away.

Of a thousand words are about one in 100,000 expressions, so to draw until one
is long enough takes hours. Here the length is drawn first, then how many
arguments share it, then how long each of those is, and so on: by the exact
probabilities, which convolutions give, of the very expressions that `grow` in
listops_trees.py makes.
"""

from collections.abc import Callable
from collections.abc import Container
from collections.abc import Mapping
import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

from meliad_rec.data.documents import Documents
from meliad_rec.data.synthetic import labelled
from meliad_rec.data.synthetic.labelled import Draws
from meliad_rec.data.vocabulary import Words

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


# Most arguments and greatest depth, None where they are as in training, and the
# shortest and longest expression.
_TESTS = {
  f'length_{words}_{words + 100}': (None, None, words + 1, words + 99)
  for words in range(200, 1000, 100)
} | {
  'args_5': (5, 9, 100, 1000),
  'args_10': (10, 9, 100, 1000),
  'args_15': (15, 9, 100, 1000),
  'lra': (10, 10, 501, 1999),
}
_ENDS = START, END
# Drawn at once: expressions, and words and brackets of them, about.
_DRAWN, _WORDS = 2**16, 2**24
_LONGEST = 2**16  # Words of an expression as it is drawn, in the mean.


@dataclasses.dataclass(frozen=True)
class ListOps:
  """Splits: train, validation, tests as in training, and tests beyond it.

  As in training are test, which no length is left out of, and test_short, the
  part of it that is no longer than train. Beyond are length_200_300 to
  length_900_1000, the bounds left out; args_5, args_10 and args_15, of so many
  arguments at most, depth 9 and 100 to 1,000 words; and lra, of 10 arguments,
  depth 10 and 501 to 1,999 words. No two expressions of a split are the same,
  and none of a test is in train or validation.

  Attributes:
    trees: expressions of train, validation and test, before the long ones are
      left out: 89, 1 and 10 of a hundred.
    max_args: most arguments of an operator.
    max_depth: of the deepest digits, where an expression that is a digit has 1.
    max_length: words of the longest expression in train and validation;
      brackets are words, and START and END do not count.
    test_trees: of each test beyond.
    seed: of the expressions.
    ends: whether documents, and the vocabulary, have START and END.
  """

  trees: int = 100_000
  max_args: int = 5
  max_depth: int = 20
  max_length: int = 100
  test_trees: int = 2000
  seed: int = 0
  ends: bool = True

  vocabulary = VOCABULARY
  splits = ('train', 'validation', 'test', 'test_short', *_TESTS)

  def __post_init__(self):
    for name, least in (
      ('trees', 3),
      ('max_args', 2),
      ('max_depth', 2),
      ('max_length', 1),
      ('test_trees', 1),
    ):
      labelled.check(f'listops.ListOps.{name}', getattr(self, name), least)
    mean = mean_length(self.max_args, self.max_depth)
    if mean > _LONGEST:
      raise ValueError(
        f'Expressions of up to {self.max_args} arguments and depth '
        f'{self.max_depth} have {mean:,.0f} words in the mean; set '
        'listops.ListOps.max_depth or listops.ListOps.max_args lower.'
      )
    if not self.ends:
      words = Words(self.vocabulary.words[: -len(_ENDS)])
      object.__setattr__(self, 'vocabulary', words)  # It is frozen.

  def documents(self, split: str) -> Documents:
    """All documents of a split, one for each expression."""
    if split not in self._made:
      self._made[split] = self._documents(split)
    return self._made[split]

  def baselines(self, split: str) -> Mapping[str, float]:
    """What a guess gets wrong, and the likeliest value of train."""
    values_N = np.fromiter(self._split(split).values(), np.int64)
    train_N = np.fromiter(self._split('train').values(), np.int64)
    likeliest = np.bincount(train_N).argmax()
    return {
      'uniform': 0.9,
      'likeliest': float((values_N != likeliest).mean()),
    }

  def _documents(self, split):
    texts = self._split(split)
    start, end = (
      bytes(self.vocabulary.encode(word).tolist())
      for word in (_ENDS if self.ends else ('', ''))
    )
    together = start + (end + start).join(texts) + end
    lengths = [len(start + text + end) for text in texts]
    starts = np.cumsum([0, *lengths])
    tokens = np.frombuffer(together, np.uint8)
    labels = np.zeros_like(tokens)
    labels[starts[1:] - 1] = [value + 1 for value in texts.values()]
    return labelled.laid(split, tokens, starts, labels, self.vocabulary)

  @functools.cached_property
  def _made(self) -> dict[str, Documents]:
    return {}

  def _split(self, split: str) -> dict[bytes, int]:
    """Expressions, as ids of a byte each, and what they give."""
    if split not in self.splits:
      raise ValueError(
        f'This task has no split {split!r}; it has {", ".join(self.splits)}.'
      )
    if split in _TESTS:
      return self._beyond(split)
    tenth, hundredth = (max(self.trees // part, 1) for part in (10, 100))
    first, last = {
      'train': (hundredth, -tenth),
      'validation': (0, hundredth),
    }.get(split, (-tenth, None))
    texts = list(self._all.items())[first:last]
    if split != 'test':
      texts = [text for text in texts if len(text[0]) <= self.max_length]
    if not texts:
      raise ValueError(
        f'No expression of {split} is of {self.max_length} words or fewer; set '
        'listops.ListOps.trees or listops.ListOps.max_length higher.'
      )
    return dict(texts)

  @functools.cached_property
  def _all(self) -> dict[bytes, int]:
    draws, sizes = Draws(self.seed), (self.max_args, self.max_depth)
    drawn = min(_DRAWN, int(_WORDS / mean_length(*sizes)))
    texts = distinct(
      lambda: grow(draws, drawn, *sizes),
      self.trees,
      'listops.ListOps.max_args or listops.ListOps.max_depth',
    )
    # Drawn, the short ones come first, as they are not new any more later.
    texts = list(texts.items())
    return dict(texts[place] for place in draws.order(len(texts)))

  def _beyond(self, split: str) -> dict[bytes, int]:
    max_args, max_depth, shortest, longest = _TESTS[split]
    max_args, max_depth = max_args or self.max_args, max_depth or self.max_depth
    lengths = Lengths(max_args, max_depth, longest)
    if not lengths.share(shortest, longest):
      raise ValueError(
        f'No expression of at most {max_args} arguments and depth {max_depth} '
        f'has from {shortest} to {longest} words; set listops.ListOps.max_args '
        'or listops.ListOps.max_depth higher.'
      )
    draws = Draws(self.seed, self.splits.index(split))
    return distinct(
      lambda: lengths.grow(draws, self.test_trees, shortest, longest),
      self.test_trees,
      'listops.ListOps.max_args or listops.ListOps.max_depth',
      taken=self._all,
    )
