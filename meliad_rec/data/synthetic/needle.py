r"""Needle in a haystack: a number hidden in long filler, asked for at the end.

With numbers of three digits and one hop, a sequence with its labels below reads

  the grass is x8 = 7 1 9 . green . x3 = x8 . the sky is blue . x3 = 7 1
                                                                   7 1 9

A label is the next digit of the answer. With one chain and no hops, this is the
passkey task of Mohtashami and Jaggi 2023. With several chains and hops, it
resembles variable tracking in RULER (Hsieh et al. 2024), which asks for all
variables of a number instead. With one chain, hops make it no harder, since the
text has only one number.

Letters of this file: N sequences, T tokens, S statements.
"""

import dataclasses
import functools
import itertools

import numpy as np

from meliad_rec.data.synthetic import labeled
from meliad_rec.data.synthetic.by_size import BySize
from meliad_rec.data.synthetic.by_size import Sizes
from meliad_rec.data.vocabulary import Words

_FILLER = (
  'the grass is green . the sky is blue . the sun is yellow . here we go . '
  'there and back again .'
)
_DEPTH = '_depth_'
_MIN_SIZE = 64  # By default, if it is enough.


@dataclasses.dataclass(frozen=True)
class Needle(BySize):
  """Passkey and variable tracking. The size is the number of tokens.

  The last variable of a random chain is asked for. If min_size is None, it is
  64, or more if the statements need more tokens. With `depths`, there are
  further splits such as test_1024_depth_50, where all statements are halfway.

  Attributes:
    chains: how many numbers are hidden; each begins a chain.
    hops: how often a chain passes its number on to another variable.
    digits: digits of a number.
    names: number of names of variables, from x0 on.
    depth: where in the filler all statements are, in percent: 0 is its
      beginning. None: each at a random place, uniformly.
    depths: depths of the further splits.
    sequences, min_size, max_size, test_sizes, test_sequences, seed: see BySize.
  """

  sequences: int = 20_000
  min_size: int | None = None
  max_size: int = 512
  test_sizes: Sizes = (1024, 4096, 16_384, 65_536)
  test_sequences: int = 200
  chains: int = 1
  hops: int = 0
  digits: int = 5
  names: int = 100
  depth: int | None = None
  depths: tuple[int, ...] = ()

  def __post_init__(self):
    for name, least in ('chains', 1), ('hops', 0), ('digits', 1):
      labeled.check_setting(self.setting(name), getattr(self, name), least)
    needed = self.chains * (1 + self.hops)
    labeled.check_setting(self.setting('names'), self.names, needed)
    if self.depth is not None:
      labeled.check_setting(self.setting('depth'), self.depth, 0, 100)
    for depth in self.depths:
      labeled.check_setting(self.setting('depths'), depth, 0, 100)
    if self.min_size is None:
      size = max(_MIN_SIZE, self.smallest)
      object.__setattr__(self, 'min_size', size)  # Frozen.
    super().__post_init__()

  @property
  def smallest(self) -> int:
    numbers, passed_on = self.chains, self.chains * self.hops
    return numbers * (3 + self.digits) + passed_on * 4 + 1 + self.digits

  @functools.cached_property
  def vocabulary(self) -> Words:
    """The digits, '=', the words of the filler, and the names."""
    names = (f'x{i}' for i in range(self.names))
    return Words([*'0123456789', '=', *dict.fromkeys(_FILLER.split()), *names])

  @functools.cached_property
  def splits(self):
    pairs = itertools.product(self._tests, self.depths)
    at_depths = (f'{name}{_DEPTH}{depth}' for name, depth in pairs)
    return *super().splits, *at_depths

  def _documents(self, split):
    name, _, depth = split.partition(_DEPTH)
    if depth:
      placed = dataclasses.replace(self, depth=int(depth), depths=())
      return placed.documents(name)
    return super()._documents(split)

  def draw(self, size_N, draws):
    N, T = len(size_N), int(size_N.max())
    tokens_NT, labels_NT = np.zeros((2, N, T), np.int64)
    rows = zip(size_N.tolist(), tokens_NT, labels_NT, strict=True)
    for size, tokens_T, labels_T in rows:
      *tokens_T[:size], labels_T[size - 1] = self._sequence(size + 1, draws)
      labels_T[size - self.digits : size - 1] = tokens_T[
        size - self.digits + 1 : size
      ]
    return tokens_NT, labels_NT

  def guess(self):
    return 0.9

  @functools.cached_property
  def _filler(self) -> np.ndarray:
    return np.array(self.vocabulary.encode(_FILLER))

  def _id(self, word: str) -> int:
    return int(self.vocabulary.encode(word)[0])

  def _sequence(self, size: int, draws: labeled.Draws) -> np.ndarray:
    """Returns int64 [size], one sequence with the last digit of its answer."""
    equals, stop, zero, x0 = map(self._id, ('=', '.', '0', 'x0'))
    S = self.chains * (1 + self.hops)
    numbers = zero + draws.below(10, self.chains * self.digits)
    numbers = numbers.reshape(self.chains, self.digits)
    chain_S = draws.order(S) % self.chains
    name_S = x0 + draws.order(self.names)[:S]
    latest, parts = {}, []
    for chain, name in zip(chain_S.tolist(), name_S.tolist(), strict=True):
      value = [latest[chain]] if chain in latest else numbers[chain]
      parts.append(np.array([name, equals, *value, stop]))
      latest[chain] = name
    asked = int(draws.below(self.chains, 1)[0])
    end = np.array([latest[asked], equals, *numbers[asked]])
    length = size - len(end) - sum(map(len, parts))
    filler = np.resize(self._filler, length)
    places = np.sort(draws.below(length + 1, S))
    if self.depth is not None:
      places = np.full(S, self.depth * length // 100)
    pieces = [*np.split(filler, places)]
    between = [
      piece for pair in zip(pieces, parts, strict=False) for piece in pair
    ]
    return np.concatenate([*between, pieces[-1], end])
