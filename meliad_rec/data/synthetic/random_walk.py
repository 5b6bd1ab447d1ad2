r"""Random walk: where is the agent, after all it did since it was put back?

An episode, with the labels below it, reads

  RESET F   L   F   R   F   F
        0,1 0,1 0,1 0,1 0,2 0,3

Fan et al. 2020, section 7.1, with 100 actions; Ju et al. 2021 have 400. They
leave open where an agent starts, which way it faces, and what the reset looks
like. Here it starts in the corner 0,0 and faces along the row; a word of its
own, not scored, opens each episode.
"""

from collections.abc import Mapping
import dataclasses
import functools

import numpy as np

from meliad_rec.data.documents import Documents
from meliad_rec.data.documents import SPLITS
from meliad_rec.data.synthetic import labelled
from meliad_rec.data.synthetic.labelled import distinct
from meliad_rec.data.synthetic.labelled import Draws
from meliad_rec.data.vocabulary import Words

RESET, FORWARD, LEFT, RIGHT = ACTIONS = 'RESET', 'F', 'L', 'R'
# Steps (rows, columns) facing east, north, west and south.
_STEPS = np.array([(0, 1), (-1, 0), (0, -1), (1, 0)])


@dataclasses.dataclass(frozen=True)
class RandomWalk:
  """The splits train, validation and test of the task.

  No two episodes, of whichever splits, have the same actions.

  Attributes:
    episodes: of the training split; the other splits have a tenth each.
    actions: of an episode.
    grid: rows, and columns, of the square; a step into its wall is ignored.
    episodes_per_document: that follow one another. The paper's only stream, cut
      into its 512 rows, has 20 in each.
    seed: of the actions.
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
      labelled.check(f'random_walk.RandomWalk.{name}', value, 1)
    labelled.check('random_walk.RandomWalk.grid', self.grid, 2)

  @functools.cached_property
  def vocabulary(self) -> Words:
    """The actions, then the places of the grid, row by row."""
    side = range(self.grid)
    places = [f'{row},{column}' for row in side for column in side]
    return Words([*ACTIONS, *places])

  def documents(self, split: str) -> Documents:
    """All documents of a split; a token's label is where the agent then is."""
    actions_NT = self._actions[labelled.rows_of(split, self.episodes)]
    reset_N1 = np.zeros((len(actions_NT), 1), np.int64)
    tokens_NX = np.concatenate([reset_N1, actions_NT + 1], 1) + 1
    places_NT = walk(actions_NT, self.grid) + len(ACTIONS) + 1
    return labelled.documents(
      split,
      tokens_NX,
      np.concatenate([reset_N1, places_NT], 1),
      self.episodes_per_document,
      self.vocabulary,
    )

  def baselines(self, split: str) -> Mapping[str, float]:
    """What a guess gets wrong, and the likeliest place, of all or by action.

    The likeliest places are those of the training split.
    """
    train_NT, places_NT = (
      walk(self._actions[labelled.rows_of(name, self.episodes)], self.grid)
      for name in ('train', split)
    )
    T, P = self.actions, self.grid**2
    counts_TP = np.bincount(
      (np.arange(T) * P + train_NT).ravel(), minlength=T * P
    ).reshape(T, P)
    return {
      'uniform': 1 - 1 / P,
      'likeliest': float((places_NT != counts_TP.sum(0).argmax()).mean()),
      'likeliest_by_action': float((places_NT != counts_TP.argmax(1)).mean()),
    }

  @functools.cached_property
  def _actions(self) -> np.ndarray:
    """int64 [episodes of all splits, T]: 0 forward, 1 left, 2 right."""
    draws, T = Draws(self.seed), self.actions
    return distinct(
      lambda count: draws.below(3, count * T).reshape(count, T),
      labelled.total(self.episodes),
      'random_walk.RandomWalk.actions',
    )


def walk(actions_NT: np.ndarray, grid: int) -> np.ndarray:
  """int64 [N, T] places, row * grid + column, after each action."""
  heading_N = np.zeros(len(actions_NT), np.int64)
  at_N2 = np.zeros((len(actions_NT), 2), np.int64)
  places = []
  for action_N in actions_NT.T:
    heading_N = (heading_N + (action_N == 1) - (action_N == 2)) % 4
    step_N2 = _STEPS[heading_N] * (action_N == 0)[:, None]
    at_N2 = np.clip(at_N2 + step_N2, 0, grid - 1)
    places.append(at_N2 @ (grid, 1))
  return np.stack(places, 1)
