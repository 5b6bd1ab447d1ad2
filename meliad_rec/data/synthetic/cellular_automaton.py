r"""Cellular automata: predicts a ring of cells whose rule must be inferred.

With rings of five cells, three states shown and radius 1, a sequence with its
labels below reads

  0 1 0 0 1 / 1 1 0 1 1 / 0 1 1 1 0 +1 ? ? ? ? ?
                                       1 1 0 1 0

Each cell becomes a function of itself and of `radius` neighbors on either side.
The function is drawn at random for each sequence, and the test splits have
functions that train does not have. The labels are the state `size` steps after
the last one shown, here one step, written `+1`.

The task is from Burtsev 2024, where architectures of fixed depth learn to
predict one step ahead, but not two or more.

Letters of this file: N sequences, S states, T tokens, W cells, R bits of a
rule.
"""

import dataclasses

import numpy as np

from meliad_rec.data.synthetic import labeled
from meliad_rec.data.synthetic.by_size import BySize
from meliad_rec.data.synthetic.by_size import Sizes
from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.vocabulary import Words

# Multiplying by it spreads numbers over 64 bits: 2^64 over the golden ratio.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(frozen=True)
class CellularAutomaton(BySize):
  """Cellular automata. The size is the number of steps ahead.

  Attributes:
    cells: number of cells in the ring.
    radius: neighbors on each side that a rule reads, at most 2. A rule has one
      bit for each of the 2^(2 radius + 1) neighborhoods.
    shown: number of states shown.
    sequences, min_size, max_size, test_sizes, test_sequences, seed: see BySize.
  """

  min_size: int = 1
  max_size: int = 4
  test_sizes: Sizes = (1, 2, 3, 4)
  cells: int = 20
  radius: int = 2
  shown: int = 10

  vocabulary = Words(['0', '1', '/', '?', *(f'+{i}' for i in range(1, 10))])

  def __post_init__(self):
    super().__post_init__()
    labeled.check_setting(self.setting('radius'), self.radius, 1, 2)
    least = 2 * self.radius + 1
    labeled.check_setting(self.setting('cells'), self.cells, least)
    labeled.check_setting(self.setting('shown'), self.shown, 2)
    for name, sizes in (
      ('max_size', [self.max_size]),
      ('test_sizes', [most for _, most in self._tests.values()]),
    ):
      for size in sizes:
        labeled.check_setting(self.setting(name), size, 1, 9)

  def draw(self, size_N, draws):
    return self._run(self._rules(len(size_N), draws, False), size_N, draws)

  def draw_train(self, size_N, draws):
    return self._run(self._rules(len(size_N), draws, True), size_N, draws)

  def _run(self, rule_NR, size_N, draws):
    """Returns tokens_NT and labels_NT of automata with these rules."""
    N, W = len(size_N), self.cells
    states = [_bits(draws, N, W)]
    for _ in range(self.shown - 1 + int(size_N.max())):
      states.append(step(states[-1], rule_NR, self.radius))
    states_NSW = np.stack(states, 1)
    zero, slash, blank, one_ahead = self.vocabulary.encode('0 / ? +1')
    shown_NSW = states_NSW[:, : self.shown] + zero
    border_NS1 = np.full((N, self.shown, 1), slash)
    shown_NT = np.concatenate([shown_NSW, border_NS1], 2).reshape(N, -1)
    shown_NT[:, -1] = one_ahead + size_N - 1
    future_NW = states_NSW[np.arange(N), self.shown - 1 + size_N] + zero
    tokens_NT = np.concatenate([shown_NT, np.full((N, W), blank)], 1)
    return tokens_NT, np.concatenate([0 * shown_NT, future_NW], 1)

  def largest(self, size):
    return (self.shown + 1) * (self.cells + 1)

  def guess(self):
    return 0.5

  def _rules(self, count: int, draws: Draws, in_train: bool) -> np.ndarray:
    """Returns int64 [count, R]: rules for train, or those for other splits."""
    R = 2 ** (2 * self.radius + 1)
    found = np.zeros((0, R), np.int64)
    while len(found) < count:
      rule_NR = _bits(draws, count, R)
      number_N = rule_NR.astype(np.uint64) @ (
        1 << np.arange(R, dtype=np.uint64)
      )
      # A hash of the rule: one of eight is not for train.
      held_out_N = number_N * _GOLDEN >> np.uint64(61) == 0
      found = np.concatenate([found, rule_NR[held_out_N != in_train]])
    return found[:count]


def _bits(draws: Draws, rows: int, columns: int) -> np.ndarray:
  bits_X = draws.bits(rows * columns) & 1
  return bits_X.reshape(rows, columns).astype(np.int64)


def step(state_NW: np.ndarray, rule_NR: np.ndarray, radius: int) -> np.ndarray:
  """Returns the next states of rings, int64 [N, W].

  Args:
    state_NW: 0 or 1 of each cell.
    rule_NR: bit i is what a cell becomes if its neighborhood, from left to
      right, reads i as a binary number.
    radius: neighbors on each side.
  """
  index_NW = np.zeros_like(state_NW)
  for offset in range(-radius, radius + 1):
    index_NW = 2 * index_NW + np.roll(state_NW, -offset, 1)
  return np.take_along_axis(rule_NR, index_NW, 1)
