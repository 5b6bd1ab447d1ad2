r"""Flip-flop: recalls the last bit written, after many bits to be ignored.

A sequence consists of pairs of an instruction (write, ignore or read) and a
bit:

  w 1 i 0 r 1 i 1 i 0 w 0 r 0
          2               1

The bit after `r` is the bit written last, and it is the label of that `r`. The
labels in the second line, 1 and 2, are the ids of the bits 0 and 1.

The task is from Liu et al. 2023. Sizes and splits are as in the code of
Ray Chowdhury and Caragea 2024, where validation mixes the settings of all test
splits, with a tenth as many sequences of each. One of these, `test`, has the
settings of train, which are also among the other six. Section 6.6 of the paper
names the six only: `validation_like_train=False`. Here every read has a label.
The published error rates count only the last read of a sequence, as the splits
`..._last` do. In the published code, inputs are shifted by one, and the next
token is the target; the labels here need no shift.

Letters of this file: N sequences, P pairs in a sequence, X pairs of all
sequences.
"""

from collections.abc import Mapping
import dataclasses
import functools

import numpy as np

from meliad_rec.data.dataset import Cached
from meliad_rec.data.documents import check_split
from meliad_rec.data.synthetic import labeled
from meliad_rec.data.synthetic.labeled import distinct
from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.vocabulary import Words

WRITE, IGNORE, READ = range(3)
TEST_IGNORE = 0.1, 0.8, 0.98
_LAST = '_last'
_CHUNK = 4096  # Sequences drawn at once, to save memory.


@dataclasses.dataclass(frozen=True)
class FlipFlop(Cached):
  """The flip-flop task, with splits train, validation and several test splits.

  The split test is like train. A split such as test_0.98_1024 is named after
  its share of ignore instructions (0.1, 0.8 or 0.98) and its number of tokens
  in a sequence: as many as in train, or twice as many. Every test split also
  exists as `..._last`, with the same sequences, where only the last read of a
  sequence has a label. A split such as validation_0.98_1024 is the part of
  validation with those settings. Otherwise no two sequences are the same,
  within a split or across splits.

  Attributes:
    sequences: number of sequences in train.
    length: number of tokens in a sequence of train and test; even.
    ignore: share of ignore instructions in train and test. In all splits,
      writes and reads are equally frequent.
    test_sequences: number of sequences in each test split. For each test split,
      validation has a tenth as many sequences with the same settings.
    seed: seed of the sequences.
    validation_like_train: whether a seventh part of validation is like the
      split test, besides the parts with the settings of the six other test
      splits. Two parts are then like train if train is as published.
  """

  sequences: int = 160_000
  length: int = 512
  ignore: float = 0.8
  test_sequences: int = 10_000
  seed: int = 0
  validation_like_train: bool = True

  vocabulary = Words(['0', '1', 'w', 'i', 'r'])

  def __post_init__(self):
    for name in ('sequences', 'test_sequences'):
      labeled.check_setting(
        f'flip_flop.FlipFlop.{name}', getattr(self, name), 1
      )
    labeled.check_setting('flip_flop.FlipFlop.length', self.length, 4)
    labeled.check_setting('flip_flop.FlipFlop.ignore', self.ignore, 0, 1)
    if self.length % 2:
      raise ValueError(
        f'length must be even (pairs of an instruction and a bit), got '
        f'{self.length}. Set flip_flop.FlipFlop.length.'
      )

  @functools.cached_property
  def splits(self) -> tuple[str, ...]:
    """Names of the splits: train, validation, all test splits, and parts."""
    lasts = [name + _LAST for name in self._tests]
    return 'train', 'validation', *self._tests, *lasts, *self._parts

  def baselines(self, split: str) -> Mapping[str, float]:
    """Returns {name: error rate from 0 to 1} of two trivial predictors.

    `uniform` guesses a random bit. `last_bit` answers with the bit of the pair
    before the read.
    """
    wrong = reads = 0
    for pairs_NP in self._split(split):
      before_NP, now_NP = pairs_NP[:, :-1], pairs_NP[:, 1:]
      if split.endswith(_LAST):
        before_NP, now_NP = before_NP[:, -1:], now_NP[:, -1:]
      reads_NP = now_NP // 2 == READ
      wrong += (reads_NP & (before_NP % 2 != now_NP % 2)).sum()
      reads += reads_NP.sum()
    return {'uniform': 0.5, 'last_bit': float(wrong / reads)}

  def _documents(self, split):
    # Alternates between the pools, so that the first documents are from each.
    rounds = zip(*self._split(split), strict=True)
    sequences = [pairs_P for one_of_each in rounds for pairs_P in one_of_each]
    starts = np.cumsum([0] + [2 * len(pairs_P) for pairs_P in sequences])
    pairs_X = np.concatenate(sequences)
    bit_0, write = self.vocabulary.encode('0 w')
    tokens = np.empty(2 * len(pairs_X), np.uint16)
    tokens[0::2], tokens[1::2] = write + pairs_X // 2, bit_0 + pairs_X % 2
    labels = np.zeros_like(tokens)
    if split.endswith(_LAST):
      labels[starts[1:] - 2] = tokens[starts[1:] - 1]
    else:
      labels[0::2] = tokens[1::2] * (pairs_X // 2 == READ)
    return labeled.from_tokens(split, tokens, starts, labels, self.vocabulary)

  @functools.cached_property
  def _tests(self) -> dict[str, tuple[float, int]]:
    """{test split: (share of ignore instructions, tokens in a sequence)}."""
    lengths = self.length, 2 * self.length
    grid = {f'test_{p}_{t}': (p, t) for p in TEST_IGNORE for t in lengths}
    return {'test': (self.ignore, self.length)} | grid

  @functools.cached_property
  def _parts(self) -> tuple[str, ...]:
    """Names of the splits that are parts of validation."""
    tests = [name for name in self._tests if name != 'test']
    return tuple(name.replace('test', 'validation') for name in tests)

  @functools.cached_property
  def _pools(self) -> list[tuple[int, float, int]]:
    """(Sequences, share of ignore instructions, tokens of each) of each pool.

    A pool is a set of sequences drawn with the same settings. The pools are, in
    this order: train, one part of validation for each test split, and each test
    split. Test splits `..._last` have no pools of their own.
    """
    tests = self._tests.values()
    tenth = max(self.test_sequences // 10, 1)
    return [
      (self.sequences, self.ignore, self.length),
      *((tenth, *test) for test in tests),
      *((self.test_sequences, *test) for test in tests),
    ]

  def _split(self, split: str) -> list[np.ndarray]:
    """Returns the sequences of each pool of a split; see `_pool`."""
    check_split(split, self.splits)
    if split == 'train':
      return [self._pool(0)]
    tests = list(self._tests)
    if split == 'validation':
      first = not self.validation_like_train
      return [self._pool(1 + i) for i in range(first, len(tests))]
    if split in self._parts:
      return [self._pool(1 + tests.index(split.replace('validation', 'test')))]
    test = tests.index(split.removesuffix(_LAST))
    return [self._pool(1 + len(tests) + test)]

  def _pool(self, i: int) -> np.ndarray:
    """Returns the sequences of pool i: uint8 [N, P], 2 * instruction + bit.

    Sequences of earlier pools are excluded. A pool is drawn on first use, so
    training does not draw the test splits.
    """
    if i not in self._drawn:
      count, ignore, length = self._pools[i]
      earlier = {
        pairs_P.tobytes()
        for j in range(i)
        if self._pools[j][2] == length
        for pairs_P in self._pool(j)
      }
      draws = Draws(self.seed, i)
      self._drawn[i] = distinct(
        lambda rows: draw(draws, rows, length // 2, ignore),
        count,
        'flip_flop.FlipFlop.length',
        excluded=earlier,
      )
    return self._drawn[i]

  @functools.cached_property
  def _drawn(self) -> dict[int, np.ndarray]:
    return {}


def draw(draws: Draws, count: int, pairs: int, ignore: float) -> np.ndarray:
  """Draws sequences that begin with a write and end with a read.

  Args:
    draws: the random numbers.
    count: number of sequences.
    pairs: number of pairs of instruction and bit in a sequence.
    ignore: probability of an ignore instruction; the rest is divided equally
      between write and read.

  Returns:
    uint8 [count, pairs], 2 * instruction + bit of each pair, where the
    instruction is WRITE, IGNORE or READ.
  """
  pairs_NP = np.empty((count, pairs), np.uint8)
  # 31 random bits choose the instruction, and one is the bit of the pair.
  ignore_end = round(ignore * 2**31)
  write_end = ignore_end + (2**31 - ignore_end) // 2
  for begin in range(0, count, _CHUNK):
    chunk_NP = pairs_NP[begin : begin + _CHUNK]
    random_NP = draws.bits(chunk_NP.size).reshape(chunk_NP.shape)
    uniform_NP = random_NP >> 1
    bit_NP = (random_NP & 1).astype(np.uint8)
    instruction_NP = np.where(uniform_NP < ignore_end, IGNORE, WRITE)
    instruction_NP = instruction_NP.astype(np.uint8)
    instruction_NP[uniform_NP >= write_end] = READ
    instruction_NP[:, 0], instruction_NP[:, -1] = WRITE, READ
    is_write_NP = instruction_NP == WRITE
    index_P = np.arange(pairs, dtype=np.int32)
    last_write_NP = np.maximum.accumulate(is_write_NP * index_P, 1)
    memory_NP = np.take_along_axis(bit_NP, last_write_NP, 1)
    bit_NP = np.where(instruction_NP == READ, memory_NP, bit_NP)
    chunk_NP[:] = 2 * instruction_NP + bit_NP
  return pairs_NP
