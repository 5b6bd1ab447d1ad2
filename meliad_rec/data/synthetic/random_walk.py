r"""Random walk: tracks the position of an agent from its actions alone.

An episode, with its labels below, reads

  RESET F   L   F   R   F   F
        0,1 0,1 0,1 0,1 0,2 0,3

F is a step forward, L a turn to the left and R a turn to the right. The label
of an action is the cell (row,column) in which the agent is after it.

This is the task of Fan et al. 2020, section 7.1, with 100 actions; Ju et al.
2021 have 400. The papers do not say where an agent starts, which way it faces,
or how a reset is written. Here it starts in the corner 0,0 facing along the
row, and each episode begins with a word RESET that is not scored.

Letters of this file: N episodes, T actions, X tokens, P cells of the grid.
"""

from collections.abc import Mapping
import dataclasses
import functools

import numpy as np

from meliad_rec.data.dataset import Cached
from meliad_rec.data.documents import SPLITS
from meliad_rec.data.synthetic import labeled
from meliad_rec.data.synthetic.labeled import distinct
from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.vocabulary import Words

RESET, FORWARD, LEFT, RIGHT = ACTIONS = 'RESET', 'F', 'L', 'R'
# Steps (row, column) when facing east, north, west and south.
_STEPS = np.array([(0, 1), (-1, 0), (0, -1), (1, 0)])


@dataclasses.dataclass(frozen=True)
class RandomWalk(Cached):
  """The random walk task, with splits train, validation and test.

  No two episodes have the same actions, within a split or across splits.

  Attributes:
    episodes: number of episodes in train; validation and test have a tenth
      each.
    actions: number of actions in an episode.
    grid: number of cells along a side of the square grid; a step out of the
      grid is ignored.
    episodes_per_document: number of consecutive episodes in a document. Fan et
      al. 2020 cut one stream of episodes into 512 batch rows of 20 episodes
      each.
    seed: seed of the actions.
  """

  episodes: int = 10_000
  actions: int = 100
  grid: int = 8
  episodes_per_document: int = 20
  seed: int = 0

  splits = SPLITS

  def __post_init__(self):
    for name in ('episodes', 'actions', 'episodes_per_document'):
      value = getattr(self, name)
      labeled.check_setting(f'random_walk.RandomWalk.{name}', value, 1)
    labeled.check_setting('random_walk.RandomWalk.grid', self.grid, 2)

  @functools.cached_property
  def vocabulary(self) -> Words:
    """RESET and the actions, then the cells of the grid, row by row."""
    side = range(self.grid)
    cells = [f'{row},{column}' for row in side for column in side]
    return Words([*ACTIONS, *cells])

  def _documents(self, split):
    """Makes the documents of a split; a label is the cell after an action."""
    actions_NT = self._actions[labeled.split_rows(split, self.episodes)]
    reset_N1 = np.zeros((len(actions_NT), 1), np.int64)
    tokens_NX = np.concatenate([reset_N1, actions_NT + 1], 1) + 1
    cells_NT = walk(actions_NT, self.grid) + len(ACTIONS) + 1
    return labeled.from_rows(
      split,
      tokens_NX,
      np.concatenate([reset_N1, cells_NT], 1),
      self.episodes_per_document,
      self.vocabulary,
    )

  def baselines(self, split: str) -> Mapping[str, float]:
    """Returns {name: error rate from 0 to 1} of three trivial predictors.

    `uniform` guesses a random cell, `likeliest` predicts the most common cell
    of train, and `likeliest_by_action` predicts the most common cell of train
    after the same number of actions.
    """
    train_NT, cells_NT = (
      walk(self._actions[labeled.split_rows(name, self.episodes)], self.grid)
      for name in ('train', split)
    )
    T, P = self.actions, self.grid**2
    counts_TP = np.bincount(
      (np.arange(T) * P + train_NT).ravel(), minlength=T * P
    ).reshape(T, P)
    return {
      'uniform': 1 - 1 / P,
      'likeliest': float((cells_NT != counts_TP.sum(0).argmax()).mean()),
      'likeliest_by_action': float((cells_NT != counts_TP.argmax(1)).mean()),
    }

  @functools.cached_property
  def _actions(self) -> np.ndarray:
    """int64 [episodes of all splits, T]: 0 forward, 1 left, 2 right."""
    draws, T = Draws(self.seed), self.actions
    return distinct(
      lambda count: draws.below(3, count * T).reshape(count, T),
      labeled.total_rows(self.episodes),
      'random_walk.RandomWalk.actions',
    )


def walk(actions_NT: np.ndarray, grid: int) -> np.ndarray:
  """Returns the cell after each action: int64 [N, T], row * grid + column.

  Args:
    actions_NT: the actions: 0 forward, 1 left, 2 right.
    grid: number of cells along a side of the grid.
  """
  heading_N = np.zeros(len(actions_NT), np.int64)
  position_N2 = np.zeros((len(actions_NT), 2), np.int64)
  cells = []
  for action_N in actions_NT.T:
    heading_N = (heading_N + (action_N == 1) - (action_N == 2)) % 4
    step_N2 = _STEPS[heading_N] * (action_N == 0)[:, None]
    position_N2 = np.clip(position_N2 + step_N2, 0, grid - 1)
    cells.append(position_N2 @ (grid, 1))
  return np.stack(cells, 1)
