r"""Word problems of groups: the product of all elements so far; parity is Z2.

In S3, whose elements are the orders of three things, a sequence with its labels
below reads

  132 213 231 132
  132 231 312 213

A label is the product of all elements up to its token, from the left. The
product a b applies the permutation a first: (a b)[i] = b[a[i]].

The task is from Merrill et al. 2024, with a label at every token. A fixed
number of layers of attention cannot solve it at all lengths if the group is not
solvable, such as A5 or S5; one recurrent layer can. In Z2, the label is the
parity of the number of ones so far.

Letters of this file: N sequences, T elements of a sequence, P tokens of an
element, G elements of the group.
"""

import dataclasses
import functools
import itertools
import re

import numpy as np

from meliad_rec.data.synthetic import labeled
from meliad_rec.data.synthetic.by_size import BySize
from meliad_rec.data.vocabulary import Words

_LARGEST = {'Z': 256, 'S': 5, 'A': 5}
_MOST = 2000  # Elements of a product of groups.


@dataclasses.dataclass(frozen=True)
class WordProblem(BySize):
  """The word problem of a group. The size is the number of elements.

  Elements are drawn uniformly and independently. Besides each split such as
  test_128 there is test_128_last, with the same sequences, where only the last
  element has a label.

  Attributes:
    group: 'Z60' is addition modulo 60, 'S5' all permutations of 5 things, 'A5'
      the even ones; 'A4xZ5' is a product of two groups.
    moved: draws only permutations that move at most this many things. 2 gives
      swaps and the identity. None: all elements.
    tokens_per_element: each element is followed by one token '.' less than
      this, and the label is on the last. With 4, a model has time for the four
      swaps that make up an element of S5.
    sequences, min_size, max_size, test_sizes, test_sequences, seed: see BySize.

  The four variants of S5 of Grazzi et al. 2024 are: all elements; moved=2;
  moved=3; and tokens_per_element=4.
  """

  group: str = 'S3'
  moved: int | None = None
  tokens_per_element: int = 1

  has_last = True

  def __post_init__(self):
    super().__post_init__()
    name = 'tokens_per_element'
    labeled.check_setting(self.setting(name), self.tokens_per_element, 1)
    if self.moved is not None:
      labeled.check_setting(self.setting('moved'), self.moved, 2)
      if not re.fullmatch('[SA][0-9]', self.group):
        raise ValueError(
          f'moved is {self.moved}, but {self.group} is no group of '
          'permutations, such as S5 or A5. Remove '
          f'{self.setting("moved")}.'
        )
    if len(self._drawn) < 2:
      raise ValueError(
        f'moved is {self.moved}, but {self.group} has only its identity then. '
        f'Increase {self.setting("moved")}.'
      )

  @functools.cached_property
  def vocabulary(self) -> Words:
    """The elements of the group, first the identity; and '.' if it is used."""
    return Words([*self._group[0], *['.'] * (self.tokens_per_element > 1)])

  def largest(self, size):
    return size * self.tokens_per_element

  def draw(self, size_N, draws):
    N, T, P = len(size_N), size_N.max(), self.tokens_per_element
    drawn = draws.below(len(self._drawn), N * T).reshape(N, T)
    elements_NT = self._drawn[drawn]
    tokens_NTP = np.full((N, T, P), len(self._group[0]) + 1)
    labels_NTP = np.zeros((N, T, P), np.int64)
    tokens_NTP[:, :, 0] = elements_NT + 1
    labels_NTP[:, :, -1] = products(elements_NT, self._group[1]) + 1
    real_NT1 = (np.arange(T) < size_N[:, None])[:, :, None]
    flat = lambda of_NTP: (of_NTP * real_NT1).reshape(N, T * P)
    return flat(tokens_NTP), flat(labels_NTP)

  def guess(self):
    return 1 - 1 / len(self._group[0])

  @functools.cached_property
  def _group(self) -> tuple[list[str], np.ndarray]:
    return group(self.group)

  @functools.cached_property
  def _drawn(self) -> np.ndarray:
    """The elements that are drawn: int64 [up to G]."""
    names = self._group[0]
    if self.moved is None:
      return np.arange(len(names))
    places = range(len(names[0]))
    moved = [sum(name[i] != names[0][i] for i in places) for name in names]
    return np.flatnonzero(np.array(moved) <= self.moved)


def products(elements_NT: np.ndarray, table_GG: np.ndarray) -> np.ndarray:
  """Returns the product of the elements up to each: int64 [N, T].

  Args:
    elements_NT: indices of elements.
    table_GG: the group's table of products.
  """
  product_N, found = elements_NT[:, 0], [elements_NT[:, 0]]
  for element_N in elements_NT.T[1:]:
    product_N = table_GG[product_N, element_N]
    found.append(product_N)
  return np.stack(found, 1)


def group(name: str) -> tuple[list[str], np.ndarray]:
  """Returns the names of a group's elements, and its table of products [G, G].

  The first element is the identity, and table[a, b] is the product a b.

  Args:
    name: see WordProblem.

  Raises:
    ValueError: there is no such group, or it is too large.
  """
  names, table_GG = [''], np.zeros((1, 1), np.int64)
  for part in str(name).split('x'):
    more, more_GG = _simple(part, name)
    count = len(more)
    if len(names) * count > _MOST:
      raise ValueError(
        f'The group {name} has more than {_MOST} elements. Set '
        'word_problem.WordProblem.group (in gin: GROUP) to a smaller one.'
      )
    names = [f'{a}{"_" * bool(a)}{b}' for a in names for b in more]
    # Element a count + b is the pair (a, b).
    table_GG = (table_GG[:, None, :, None] * count + more_GG[:, None]).reshape(
      len(names), len(names)
    )
  return names, table_GG


def _simple(name: str, whole: str) -> tuple[list[str], np.ndarray]:
  """Returns `group` of a group that is no product; `whole` is for messages."""
  kind, size = name[:1], name[1:]
  if kind not in _LARGEST or not size.isdecimal():
    raise ValueError(
      f'There is no group {whole!r}. Use names such as Z60, S5, A5 or A4xZ5. '
      'Set word_problem.WordProblem.group (in gin: GROUP).'
    )
  n = int(size)
  least = 3 if kind == 'A' else 2
  if not least <= n <= _LARGEST[kind]:
    raise ValueError(
      f'The number in {kind}{n} must be from {least} to {_LARGEST[kind]}. Set '
      'word_problem.WordProblem.group (in gin: GROUP).'
    )
  if kind == 'Z':
    element_G = np.arange(n)
    return [str(i) for i in range(n)], (element_G[:, None] + element_G) % n
  orders = [
    p for p in itertools.permutations(range(n)) if kind == 'S' or _is_even(p)
  ]
  index = {order: i for i, order in enumerate(orders)}
  table = [[index[tuple(b[i] for i in a)] for b in orders] for a in orders]
  names = [''.join(str(i + 1) for i in order) for order in orders]
  return names, np.array(table)


def _is_even(order: tuple[int, ...]) -> bool:
  pairs = itertools.combinations(order, 2)
  return sum(a > b for a, b in pairs) % 2 == 0
