r"""Flip-flop: which bit was written last, with much to be ignored since?

A sequence of pairs of an instruction, write, ignore or read, and a bit:

  w 1 i 0 r 1 i 1 i 0 w 0 r 0
          2             1

A bit that is read is the one written last, and is the label of the `r` before
it; the labels 1 and 2, here below, are the ids of the bits 0 and 1.

Liu et al. 2023, with the sizes and splits of the code of Ray Chowdhury and
Caragea 2024: there validation has a tenth as much of each test setting. Each
read has a label; their figure is of the last read alone, as in the splits
called `..._last`. Their input is shifted by one; labels here need no shift.
"""

from collections.abc import Mapping
import dataclasses
import functools

import numpy as np

from meliad_rec.data.documents import Documents
from meliad_rec.data.synthetic import labelled
from meliad_rec.data.synthetic.labelled import distinct
from meliad_rec.data.synthetic.labelled import Draws
from meliad_rec.data.vocabulary import Words

WRITE, IGNORE, READ = range(3)
TEST_IGNORE = 0.1, 0.8, 0.98
_LAST = '_last'
_ROWS = 4096  # Drawn at once, to save memory.


@dataclasses.dataclass(frozen=True)
class FlipFlop:
  """Splits: train, validation, test, and test_P_T, of other P and length T.

  P is the share of instructions that ignore, 0.1, 0.8 or 0.98; T is once or
  twice the length of train. All test splits exist as `..._last` too, where the
  last read alone has a label. No two sequences, of whichever splits, are the
  same.

  Attributes:
    sequences: of the training split.
    length: of a sequence of train and test, in tokens.
    ignore: share of instructions that ignore, in train and test; writes and
      reads share the rest evenly.
    test_sequences: of each test split; validation has a tenth as many of each.
    seed: of the sequences.
  """

  sequences: int = 160_000
  length: int = 512
  ignore: float = 0.8
  test_sequences: int = 10_000
  seed: int = 0

  vocabulary = Words(['0', '1', 'w', 'i', 'r'])

  def __post_init__(self):
    for name in ('sequences', 'test_sequences'):
      labelled.check(f'flip_flop.FlipFlop.{name}', getattr(self, name), 1)
    labelled.check('flip_flop.FlipFlop.length', self.length, 4)
    labelled.check('flip_flop.FlipFlop.ignore', self.ignore, 0, 1)
    if self.length % 2:
      raise ValueError(
        f'length is {self.length}; it must be even, as an instruction and a '
        'bit make a pair. Set flip_flop.FlipFlop.length.'
      )

  @functools.cached_property
  def splits(self) -> tuple[str, ...]:
    """Train, validation, and all test splits."""
    lasts = [name + _LAST for name in self._tests]
    return 'train', 'validation', *self._tests, *lasts

  def documents(self, split: str) -> Documents:
    """All documents of a split, one for each sequence."""
    if split not in self._made:
      self._made[split] = self._documents(split)
    return self._made[split]

  def baselines(self, split: str) -> Mapping[str, float]:
    """What a guess gets wrong, and to repeat the bit before the read."""
    wrong = asked = 0
    for pairs_NP in self._split(split):
      before_NP, now_NP = pairs_NP[:, :-1], pairs_NP[:, 1:]
      if split.endswith(_LAST):
        before_NP, now_NP = before_NP[:, -1:], now_NP[:, -1:]
      reads_NP = now_NP // 2 == READ
      wrong += (reads_NP & (before_NP % 2 != now_NP % 2)).sum()
      asked += reads_NP.sum()
    return {'uniform': 0.5, 'last_bit': float(wrong / asked)}

  def _documents(self, split):
    # Of all pools in turn, so that the first documents are of each.
    turns = zip(*self._split(split), strict=True)
    sequences = [pairs_P for turn in turns for pairs_P in turn]
    starts = np.cumsum([0] + [2 * len(pairs_P) for pairs_P in sequences])
    pairs_X = np.concatenate(sequences)
    bits, words = 1, 3  # The ids of the first of each.
    tokens = np.empty(2 * len(pairs_X), np.uint16)
    tokens[0::2], tokens[1::2] = words + pairs_X // 2, bits + pairs_X % 2
    labels = np.zeros_like(tokens)
    if split.endswith(_LAST):
      labels[starts[1:] - 2] = tokens[starts[1:] - 1]
    else:
      labels[0::2] = tokens[1::2] * (pairs_X // 2 == READ)
    return labelled.laid(split, tokens, starts, labels, self.vocabulary)

  @functools.cached_property
  def _made(self) -> dict[str, Documents]:
    return {}

  @functools.cached_property
  def _tests(self) -> dict[str, tuple[float, int]]:
    """The share that ignores, and the length, of each test split."""
    longer = self.length, 2 * self.length
    grid = {f'test_{p}_{t}': (p, t) for p in TEST_IGNORE for t in longer}
    return {'test': (self.ignore, self.length)} | grid

  @functools.cached_property
  def _pools(self) -> list[tuple[int, float, int]]:
    """Sequences, share and length: train, each of validation, each test."""
    tests = self._tests.values()
    tenth = max(self.test_sequences // 10, 1)
    return [
      (self.sequences, self.ignore, self.length),
      *((tenth, *test) for test in tests),
      *((self.test_sequences, *test) for test in tests),
    ]

  def _split(self, split: str) -> list[np.ndarray]:
    """The pools of a split."""
    if split not in self.splits:
      raise ValueError(
        f'This task has no split {split!r}; it has {", ".join(self.splits)}.'
      )
    if split == 'train':
      return [self._pool(0)]
    tests = list(self._tests)
    if split == 'validation':
      return [self._pool(1 + i) for i in range(len(tests))]
    place = tests.index(split.removesuffix(_LAST))
    return [self._pool(1 + len(tests) + place)]

  def _pool(self, place: int) -> np.ndarray:
    """uint8 [sequences, pairs], 2 * instruction + bit; none of earlier pools.

    Pools are made when they are asked for: to train needs no test split.
    """
    if place not in self._drawn:
      count, ignore, length = self._pools[place]
      before = [
        pairs_P.tobytes()
        for earlier in range(place)
        if self._pools[earlier][2] == length
        for pairs_P in self._pool(earlier)
      ]
      draws = Draws(self.seed, place)
      self._drawn[place] = distinct(
        lambda rows: draw(draws, rows, length // 2, ignore),
        count,
        'flip_flop.FlipFlop.length',
        taken=set(before),
      )
    return self._drawn[place]

  @functools.cached_property
  def _drawn(self) -> dict[int, np.ndarray]:
    return {}


def draw(draws: Draws, count: int, pairs: int, ignore: float) -> np.ndarray:
  """uint8 [count, pairs], 2 * instruction + bit; a write first, a read last."""
  made_NP = np.empty((count, pairs), np.uint8)
  # Of 31 bits: one of the 32 is the bit of the pair.
  ignored = round(ignore * 2**31)
  written = ignored + (2**31 - ignored) // 2
  for begin in range(0, count, _ROWS):
    rows_NP = made_NP[begin : begin + _ROWS]
    random_NP = draws.bits(rows_NP.size).reshape(rows_NP.shape)
    level_NP = random_NP >> 1
    bit_NP = (random_NP & 1).astype(np.uint8)
    does_NP = np.where(level_NP < ignored, IGNORE, WRITE).astype(np.uint8)
    does_NP[level_NP >= written] = READ
    does_NP[:, 0], does_NP[:, -1] = WRITE, READ
    places_P = np.arange(pairs, dtype=np.int32)
    last_NP = np.maximum.accumulate((does_NP == WRITE) * places_P, 1)
    held_NP = np.take_along_axis(bit_NP, last_NP, 1)
    rows_NP[:] = 2 * does_NP + np.where(does_NP == READ, held_NP, bit_NP)
  return made_NP
