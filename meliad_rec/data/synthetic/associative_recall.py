r"""Associative recall: the value that was given with a key, asked for later.

With three pairs, a sequence with its labels below reads

  k7 v2 k1 v9 k4 v2 k1 v5 v3 v6 k7 v8 k4 ...
                    v9          v2    v2

First come pairs of a key and its value, and then each key again, once, among
random values. The label of a repeated key is its value.

The task is multi-query associative recall of Arora et al. 2023. Questions come
soon after the pairs rather than late, by a power law. In their code, zoology:

- keys are 1 to 4,095 and values 4,096 to 8,191 (here 256 of each), and no value
  occurs twice in the pairs of a sequence (here each is drawn independently);
- the tokens between questions are from the whole vocabulary (`filler_keys`);
- earlier pairs tend to be asked for earlier (here the questions are in random
  order);
- a set has one number of pairs and one number of tokens, such as 4 pairs in 64
  tokens or 64 pairs in 512 (here the number of pairs varies within the bounds,
  and there are `length` tokens for each);
- there are 3,000 test sequences (here 1,000 of each split).

With rewrites, some pairs repeat a key with another value, and the last value
counts, as in Rodkin et al. 2024. With two passes, all pairs are given twice, as
in Arora et al. 2024 (JRT).

Letters of this file: N sequences, P pairs, Q questions, T tokens.
"""

import dataclasses

import numpy as np

from meliad_rec.data.synthetic import labeled
from meliad_rec.data.synthetic.by_size import BySize
from meliad_rec.data.synthetic.by_size import Sizes
from meliad_rec.data.vocabulary import Words


@dataclasses.dataclass(frozen=True)
class AssociativeRecall(BySize):
  """Multi-query associative recall. The size is the number of pairs.

  Attributes:
    keys: number of keys in the vocabulary, at least as many as pairs.
    values: number of values in the vocabulary.
    length: tokens per pair: 2 for the pair in each pass, and at least 2 for its
      question and the token after it.
    power: the k-th place for a question, counted from 1, has a weight
      proportional to k^(power - 1). A small power makes most questions early,
      and 1 distributes them uniformly.
    rewrites: share of the pairs that repeat the key of an earlier pair, from 0
      to 0.9.
    filler_keys: whether the tokens between questions are keys too, without
      labels, and not values only.
    passes: how often all pairs are given, in the same order, before the
      questions.
    sequences, min_size, max_size, test_sizes, test_sequences, seed: see BySize.
  """

  min_size: int = 4
  max_size: int = 16
  test_sizes: Sizes = (4, 8, 16, 32, 64)
  keys: int = 256
  values: int = 256
  length: int = 8
  power: float = 0.01
  rewrites: float = 0.0
  filler_keys: bool = False
  passes: int = 1

  def __post_init__(self):
    super().__post_init__()
    pairs = max([self.max_size, *(most for _, most in self._tests.values())])
    labeled.check_setting(self.setting('keys'), self.keys, pairs)
    labeled.check_setting(self.setting('values'), self.values, 2)
    labeled.check_setting(self.setting('passes'), self.passes, 1)
    least = 2 * self.passes + 2
    labeled.check_setting(self.setting('length'), self.length, least)
    labeled.check_setting(self.setting('rewrites'), self.rewrites, 0, 0.9)
    if not 0 < self.power <= 1:
      raise ValueError(
        f'power must be above 0 and at most 1, got {self.power}. Set '
        f'{self.setting("power")}.'
      )

  @property
  def vocabulary(self) -> Words:
    """The keys, and then the values."""
    keys = (f'k{i}' for i in range(self.keys))
    return Words([*keys, *(f'v{i}' for i in range(self.values))])

  def draw(self, size_N, draws):
    N, P = len(size_N), int(size_N.max())
    T = P * self.length
    pair_NP = np.arange(P) < size_N[:, None]
    # Different keys: the first of a random order of all keys.
    bits_NK = draws.bits(N * self.keys).reshape(N, -1)
    order_NK = np.argsort(bits_NK, 1, kind='stable')
    key_NP = order_NK[:, :P]
    value_NP = draws.below(self.values, N * P).reshape(N, P)
    again_NP = draws.between_0_and_1(N * P).reshape(N, P) < self.rewrites
    source_NP = draws.below(np.tile(np.arange(P).clip(1), N), N * P)
    key_NP = _rewrite(key_NP, again_NP, source_NP.reshape(N, P))
    least = 1 if self.filler_keys else self.keys + 1
    drawn = draws.between(least, self.keys + self.values, N * T)
    tokens_NT = drawn.reshape(N, T)
    tokens_NT *= np.arange(T) < (size_N * self.length)[:, None]
    labels_NT = np.zeros((N, T), np.int64)
    # A key is asked for once, with the value of its last pair.
    asked_NP = pair_NP & _is_last(key_NP, pair_NP)
    place_NP = self._places(size_N, P, draws)
    n, p = np.nonzero(pair_NP)
    for i in range(self.passes):
      places = 2 * (i * size_N[n] + p)
      tokens_NT[n, places] = key_NP[n, p] + 1
      tokens_NT[n, places + 1] = self.keys + 1 + value_NP[n, p]
    n, p = np.nonzero(asked_NP)
    tokens_NT[n, place_NP[n, p]] = key_NP[n, p] + 1
    labels_NT[n, place_NP[n, p]] = self.keys + 1 + value_NP[n, p]
    return tokens_NT, labels_NT

  def largest(self, size):
    return size * self.length + self.keys

  def guess(self):
    return 1 - 1 / self.values

  def _places(self, size_N, P: int, draws: labeled.Draws) -> np.ndarray:
    """Returns int64 [N, P], a different place for the question of each pair."""
    # After one pass, the places of a sequence of P pairs are 2 P, 2 P + 2, ...
    N = len(size_N)
    slots_N = size_N * (self.length - 2 * self.passes) // 2
    S = int(slots_N.max())
    weight_S = np.arange(1, S + 1) ** (self.power - 1)
    weight_NS = weight_S * (np.arange(S) < slots_N[:, None])
    # Drawing without replacement: the greatest weights after Gumbel noise.
    noise_NS = -np.log(-np.log(draws.between_0_and_1(N * S))).reshape(N, S)
    with np.errstate(divide='ignore'):
      order_NS = np.argsort(-np.log(weight_NS) - noise_NS, 1, kind='stable')
    # A pair gets a random one of the first P places drawn.
    place_NP = order_NS[:, :P]
    bits_NP = draws.bits(N * P).reshape(N, P)
    mixed_NP = np.argsort(bits_NP, 1, kind='stable')
    first_NP = np.arange(P) < size_N[:, None]
    # Pairs that do not exist stay last, so that the others get all places.
    mixed_NP = np.argsort(
      np.where(first_NP, mixed_NP, P + np.arange(P)), 1, kind='stable'
    )
    found_NP = np.take_along_axis(place_NP, mixed_NP, 1)
    return 2 * (self.passes * size_N[:, None] + found_NP)


def _rewrite(key_NP, again_NP, source_NP) -> np.ndarray:
  """Returns the keys, where some are replaced by the keys of earlier pairs."""
  key_NP, rows_N = key_NP.copy(), np.arange(len(key_NP))
  for p in range(1, key_NP.shape[1]):
    earlier_N = key_NP[rows_N, source_NP[:, p]]
    key_NP[:, p] = np.where(again_NP[:, p], earlier_N, key_NP[:, p])
  return key_NP


def _is_last(key_NP, pair_NP) -> np.ndarray:
  """Returns bool [N, P]: whether no later pair has the key of a pair."""
  P = key_NP.shape[1]
  last_NP = np.ones_like(pair_NP)
  for p in range(P - 1):
    later_NP = (key_NP[:, p + 1 :] == key_NP[:, p, None]) & pair_NP[:, p + 1 :]
    last_NP[:, p] = ~later_NP.any(1)
  return last_NP
