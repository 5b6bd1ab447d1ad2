r"""Modular arithmetic: the value of an expression of digits, modulo 5.

Without and with brackets, a sequence with its label below reads

  3 + 4 * 2 - 1 =          ( ( 3 + 4 ) * 2 ) =
                0                            4

Without brackets, products come before sums. With brackets, every operation is
in brackets. The label is at the equals sign. The tasks resemble two of Deletang
et al. 2023, who find that transformers do not extrapolate to greater lengths.
With brackets and modulus 5, the value 0 is the most frequent: 27 % in train and
31 % in test_256.

Letters of this file: N expressions, T tokens, K numbers of an expression.
"""

import dataclasses

import numpy as np

from meliad_rec.data.synthetic import labeled
from meliad_rec.data.synthetic.by_size import BySize
from meliad_rec.data.synthetic.by_size import Sizes
from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.vocabulary import Words

_OPERATORS = '+', '-', '*'
_SYMBOLS = *_OPERATORS, '=', '(', ')'


@dataclasses.dataclass(frozen=True)
class Arithmetic(BySize):
  """Modular arithmetic. The size is the maximum number of tokens.

  An expression has as many numbers as fit: n numbers have 2 n tokens without
  brackets, and 4 n - 2 with them, with the equals sign. The default sizes are
  from Grazzi et al. 2024, whose test split is test_40_256.

  Attributes:
    modulus: numbers are drawn from 0 to modulus - 1, at most 10.
    brackets: whether each operation has brackets; they nest at random.
    sequences, min_size, max_size, test_sizes, test_sequences, seed: see BySize.
  """

  min_size: int = 3
  max_size: int = 40
  test_sizes: Sizes = (64, 128, 256, (40, 256))
  modulus: int = 5
  brackets: bool = False

  def __post_init__(self):
    super().__post_init__()
    labeled.check_setting(self.setting('modulus'), self.modulus, 2, 10)

  @property
  def vocabulary(self) -> Words:
    """The digits, and then the symbols."""
    return Words([*map(str, range(self.modulus)), *_SYMBOLS])

  @property
  def smallest(self):
    return 2

  def draw(self, size_N, draws):
    if self.brackets:
      tokens_NT, value_N = self._bracketed((size_N + 2) // 4, draws)
    else:
      tokens_NT, value_N = self._flat(size_N // 2, draws)
    equals = self._id('=')
    labels_NT = (value_N[:, None] + 1) * (tokens_NT == equals)
    return tokens_NT, labels_NT

  def guess(self):
    return 1 - 1 / self.modulus

  def _id(self, symbol: str) -> int:
    return self.modulus + 1 + _SYMBOLS.index(symbol)

  def _flat(self, count_N, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens [N, T] and values [N] of expressions without brackets."""
    N, K = len(count_N), int(count_N.max())
    number_NK = draws.below(self.modulus, N * K).reshape(N, K)
    operator_NK = draws.below(len(_OPERATORS), N * K).reshape(N, K)
    tokens_NT = np.zeros((N, 2 * K), np.int64)
    tokens_NT[:, 0::2] = number_NK + 1
    tokens_NT[:, 1::2] = self._id('+') + operator_NK
    tokens_NT *= np.arange(2 * K) < 2 * count_N[:, None]
    tokens_NT[np.arange(N), 2 * count_N - 1] = self._id('=')
    # The value is total + product, where the product is of the last numbers.
    total_N, product_N = np.zeros(N, np.int64), number_NK[:, 0]
    for k in range(1, K):
      number_N, operator_N = number_NK[:, k], operator_NK[:, k - 1]
      real_N, times_N = k < count_N, operator_N == _OPERATORS.index('*')
      signed_N = np.where(operator_N == 1, -number_N, number_N)
      total_N = np.where(real_N & ~times_N, total_N + product_N, total_N)
      next_N = np.where(times_N, product_N * number_N, signed_N) % self.modulus
      product_N = np.where(real_N, next_N, product_N)
    return tokens_NT, (total_N + product_N) % self.modulus

  def _bracketed(self, count_N, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens [N, T] and values [N] of expressions with brackets."""
    # K numbers, K - 1 operations with their brackets, and "=".
    tokens_NT = np.zeros((len(count_N), 4 * int(count_N.max()) - 2), np.int64)
    values = []
    random = iter(draws.bits(int((3 * count_N).sum())).tolist())
    for tokens_T, count in zip(tokens_NT, count_N.tolist(), strict=True):
      expression, value = self._nested(count, random)
      tokens_T[: len(expression) + 1] = [*expression, self._id('=')]
      values.append(value)
    return tokens_NT, np.array(values)

  def _nested(self, count: int, random) -> tuple[list[int], int]:
    """Returns the tokens and the value of an expression of `count` numbers."""
    drawn = next(random)
    if count == 1:
      number = drawn % self.modulus
      return [number + 1], number
    left, a = self._nested(1 + drawn % (count - 1), random)
    right, b = self._nested(count - 1 - drawn % (count - 1), random)
    operator = _OPERATORS[next(random) % len(_OPERATORS)]
    value = {'+': a + b, '-': a - b, '*': a * b}[operator] % self.modulus
    middle = [*left, self._id(operator), *right]
    return [self._id('('), *middle, self._id(')')], value
