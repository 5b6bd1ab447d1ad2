r"""ListOps: predicts the value of an expression of nested minima, maxima, ...

A document is an expression, and its value, 0 to 9, is the label of the last
token:

  START [MAX 2 9 [MIN 4 7 ] 0 ] END
                                9

Expressions are drawn by the rules of Nangia and Bowman 2018; see
listops_trees.py. Duplicates are dropped, so short expressions are rarer than in
the draws. The splits are as in Ray Chowdhury and Caragea 2024: the first 1,000
expressions of the training set are validation, and there are test splits with
longer expressions, with more arguments, and as in the Long Range Arena (Tay et
al. 2021).

There is one difference from their splits, unless validation_like_train=False,
as in the experiments of their table: validation here, like train, leaves out
expressions of more than 100 words. 891 of the 1,000 expressions remain. They
are easier on average than those left out. The split test has expressions of all
lengths.

LRAListOps trains on expressions as long as in the Long Range Arena.
"""

from collections.abc import Mapping
import dataclasses
import functools
import itertools

import numpy as np

from meliad_rec.data.documents import check_split
from meliad_rec.data.documents import SPLITS
from meliad_rec.data.synthetic import labeled
from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.synthetic.listops_trees import distinct
from meliad_rec.data.synthetic.listops_trees import grow
from meliad_rec.data.synthetic.listops_trees import Lengths
from meliad_rec.data.synthetic.listops_trees import mean_length
from meliad_rec.data.synthetic.listops_trees import VOCABULARY

# By test split: maximum arguments, maximum depth (None: as in train), and the
# lengths in words of the shortest and longest expression.
_TESTS = {
  f'length_{words}_{words + 100}': (None, None, words + 1, words + 99)
  for words in range(200, 1000, 100)
} | {
  'args_5': (5, 9, 100, 1000),
  'args_10': (10, 9, 100, 1000),
  'args_15': (15, 9, 100, 1000),
  'lra': (10, 10, 501, 1999),
}
# Limits for one draw: expressions, and approximately their words.
_EXPRESSIONS, _WORDS = 2**16, 2**24
_LONG = 4096  # Long expressions drawn at once.
_MEAN_LENGTH = 2**16  # Limit for the mean length of an expression.


class _Expressions(labeled.WithEnds):
  """Base class of tasks of ListOps, frozen dataclasses with `ends`."""

  vocabulary = VOCABULARY
  splits = SPLITS

  def _check(self, least: Mapping[str, int]):
    """Checks {attribute: least value}, and sets the vocabulary."""
    kind = type(self).__name__
    for name, value in least.items():
      labeled.check_setting(
        f'listops.{kind}.{name}', getattr(self, name), value
      )
    mean = mean_length(self.max_args, self.max_depth)
    if mean > _MEAN_LENGTH:
      raise ValueError(
        f'Expressions with max_args={self.max_args} and '
        f'max_depth={self.max_depth} have {mean:,.0f} words on average. '
        f'Decrease listops.{kind}.max_depth or listops.{kind}.max_args.'
      )
    self._drop_ends()

  def baselines(self, split: str) -> Mapping[str, float]:
    """Returns {name: error rate from 0 to 1} of two trivial predictors.

    `uniform` guesses a random value. `likeliest` always answers with the most
    common value in train.
    """
    values_N = np.fromiter(self._split(split).values(), np.int64)
    train_N = np.fromiter(self._split('train').values(), np.int64)
    likeliest = np.bincount(train_N).argmax()
    return {
      'uniform': 0.9,
      'likeliest': float((values_N != likeliest).mean()),
    }

  def _documents(self, split):
    expressions = self._split(split)
    start, end = bytes(self.end_ids[:1]), bytes(self.end_ids[1:])
    documents = [start + expression + end for expression in expressions]
    starts = np.cumsum([0, *map(len, documents)])
    tokens = np.frombuffer(b''.join(documents), np.uint8)
    labels = np.zeros_like(tokens)
    labels[starts[1:] - 1] = [value + 1 for value in expressions.values()]
    return labeled.from_tokens(split, tokens, starts, labels, self.vocabulary)

  def _split(self, split: str) -> dict[bytes, int]:
    """Returns {ids of an expression, as bytes: its value} of a split."""
    raise NotImplementedError

  def _known(self, split: str) -> None:
    """Raises ValueError if there is no such split."""
    check_split(split, self.splits)


@dataclasses.dataclass(frozen=True)
class ListOps(_Expressions):
  """The ListOps task, with in-distribution and out-of-distribution tests.

  The split test is like train but includes expressions of all lengths;
  test_short has those of test that are as short as in train. The other test
  splits are out of distribution:
  - length_200_300, length_300_400, ..., length_900_1000: expressions with more
    words than the first number and fewer than the second;
  - args_5, args_10 and args_15: up to that many arguments of an operator, up to
    depth 9, and 100 to 1,000 words;
  - lra: up to 10 arguments, up to depth 10, and 501 to 1,999 words.

  No two expressions of a split are the same, and no test split shares any with
  train or validation.

  Attributes:
    trees: number of expressions of train (89 %), validation (1 %) and test
      (10 %), before long ones are left out of train and validation.
    max_args: maximum number of arguments of an operator.
    max_depth: greatest depth of a digit; a digit alone has depth 1.
    max_length: maximum number of words of an expression in train, validation
      and test_short. `[MAX` and `]` are one word each; START and END do not
      count.
    test_trees: number of expressions in each out-of-distribution test split.
    seed: seed of the expressions.
    ends: whether documents and vocabulary have the words START and END.
    validation_like_train: whether max_length also holds for validation. Without
      it, validation has all lengths, as the authors' has.
  """

  trees: int = 100_000
  max_args: int = 5
  max_depth: int = 20
  max_length: int = 100
  test_trees: int = 2000
  seed: int = 0
  ends: bool = True
  validation_like_train: bool = True

  splits = ('train', 'validation', 'test', 'test_short', *_TESTS)

  def __post_init__(self):
    least = {'max_args': 2, 'max_depth': 2, 'max_length': 1}
    self._check({'trees': 3, 'test_trees': 1} | least)

  def _split(self, split: str) -> dict[bytes, int]:
    self._known(split)
    if split in _TESTS:
      return self._test(split)
    tenth, hundredth = (max(self.trees // part, 1) for part in (10, 100))
    first, last = {
      'train': (hundredth, -tenth),
      'validation': (0, hundredth),
    }.get(split, (-tenth, None))
    items = list(self._all.items())[first:last]
    whole = {'test'} if self.validation_like_train else {'test', 'validation'}
    if split not in whole:
      items = [item for item in items if len(item[0]) <= self.max_length]
    if not items:
      raise ValueError(
        f'No expression of {split} has at most {self.max_length} words. '
        'Increase listops.ListOps.trees or listops.ListOps.max_length.'
      )
    return dict(items)

  @functools.cached_property
  def _all(self) -> dict[bytes, int]:
    """{ids of an expression, as bytes: its value}.

    The expressions are those of train, validation and test, before long ones
    are left out.
    """
    draws, sizes = Draws(self.seed), (self.max_args, self.max_depth)
    count = min(_EXPRESSIONS, int(_WORDS / mean_length(*sizes)))
    expressions = distinct(
      lambda: grow(draws, count, *sizes),
      self.trees,
      'listops.ListOps.max_args or listops.ListOps.max_depth',
    )
    # Shuffled, because most short expressions are found first: later draws of
    # them are duplicates.
    items = list(expressions.items())
    return dict(items[i] for i in draws.order(len(items)))

  def _test(self, split: str) -> dict[bytes, int]:
    max_args, max_depth, shortest, longest = _TESTS[split]
    max_args, max_depth = max_args or self.max_args, max_depth or self.max_depth
    lengths = Lengths(max_args, max_depth, longest)
    if not lengths.share(shortest, longest):
      raise ValueError(
        f'No expression with max_args={max_args} and max_depth={max_depth} '
        f'has {shortest} to {longest} words. Increase listops.ListOps.max_args '
        'or listops.ListOps.max_depth.'
      )
    draws = Draws(self.seed, self.splits.index(split))
    return distinct(
      lambda: lengths.grow(draws, self.test_trees, shortest, longest),
      self.test_trees,
      'listops.ListOps.max_args or listops.ListOps.max_depth',
      excluded=self._all,
    )


@dataclasses.dataclass(frozen=True)
class LRAListOps(_Expressions):
  """ListOps of the Long Range Arena, with splits train, validation and test.

  All have expressions of the same lengths, and no two are the same, within a
  split or across splits. Drawing the 100,000 expressions of the Long Range
  Arena takes a minute.

  Attributes:
    expressions: number of expressions of train.
    test_expressions: number of expressions of validation, and of test.
    max_args: maximum number of arguments of an operator.
    max_depth: greatest depth of a digit; a digit alone has depth 1.
    min_length: minimum number of words of an expression, as in ListOps.
    max_length: maximum number of words of an expression.
    seed: seed of the expressions.
    ends: whether documents and vocabulary have the words START and END.
  """

  expressions: int = 96_000
  test_expressions: int = 2000
  max_args: int = 10
  max_depth: int = 10
  min_length: int = 501
  max_length: int = 1999
  seed: int = 0
  ends: bool = True

  def __post_init__(self):
    self._check(
      {
        'expressions': 1,
        'test_expressions': 1,
        'max_args': 2,
        'max_depth': 2,
        'min_length': 1,
        'max_length': self.min_length,
      }
    )

  def _split(self, split):
    self._known(split)
    others = self.test_expressions
    first = {'train': 2 * others, 'validation': 0, 'test': others}[split]
    count = self.expressions if split == 'train' else others
    return dict(itertools.islice(self._all.items(), first, first + count))

  @functools.cached_property
  def _all(self) -> dict[bytes, int]:
    """Expressions of validation, test and train."""
    lengths = Lengths(self.max_args, self.max_depth, self.max_length)
    if not lengths.share(self.min_length, self.max_length):
      raise ValueError(
        f'No expression with max_args={self.max_args} and '
        f'max_depth={self.max_depth} has {self.min_length} to '
        f'{self.max_length} words. Change listops.LRAListOps.min_length.'
      )
    draws, count = Draws(self.seed), 2 * self.test_expressions
    count += self.expressions
    return distinct(
      lambda: lengths.grow(
        draws, min(count, _LONG), self.min_length, self.max_length
      ),
      count,
      'listops.LRAListOps.max_args or listops.LRAListOps.max_depth',
    )
