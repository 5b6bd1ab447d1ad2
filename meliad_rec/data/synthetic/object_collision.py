r"""Object collision: where did objects of two given colors last meet?

Two objects move on a grid. The words of each step, with the label below, are

  r3 c7 red r9 c2 blue red? green?
                              NE

These are row, column and color of the first and of the second object, and a
question: in which quarter of the grid the two last met while the first was red
and the second was green. Rows with small numbers are north, and columns with
small numbers are west.
There is no label if they have never done so.

This is the task of Sukhbaatar et al. 2021 (Expire-Span), by the rules of its
authors' code, which has one stream of 50 million steps for training. Here a
document is a stream of its own, and before the first collision all questions
are random. Objects meet once in some 350 steps, so short streams have few
answers besides the last collision.

Letters of this file: N documents, S steps of each, O the two objects, C colors.
"""

from collections.abc import Mapping
import dataclasses
import functools

import numpy as np

from meliad_rec.data.dataset import Cached
from meliad_rec.data.documents import SPLITS
from meliad_rec.data.synthetic import labeled
from meliad_rec.data.synthetic.labeled import Draws
from meliad_rec.data.vocabulary import Words

COLORS = (
  *('red', 'green', 'blue', 'yellow', 'white'),
  *('black', 'orange', 'purple', 'brown', 'pink'),
)
QUARTERS = 'NW', 'NE', 'SW', 'SE'
_OBJECTS = 2


@dataclasses.dataclass(frozen=True)
class ObjectCollision(Cached):
  """The object collision task, with splits train, validation and test.

  Objects start at uniform places. Each keeps its velocity, drawn from a normal
  distribution, until its next step would leave the grid; then velocities are
  drawn until one does not. Objects meet if they are in the same cell.

  Attributes:
    streams: number of documents in train; validation and test have a tenth
      each.
    steps: number of steps in a document, of 8 tokens each.
    grid: number of cells along a side of the square grid; even.
    colors: number of colors.
    speed: standard deviation of a velocity along each side, in cells per step.
    color_change: probability that an object takes a random color in a step.
    easy: probability that a question is about the last collision.
    seed: seed of the objects and questions.

  Raises:
    ValueError: a setting is out of its range.
  """

  streams: int = 100
  steps: int = 32_768
  grid: int = 16
  colors: int = 5
  speed: float = 0.5
  color_change: float = 0.05
  easy: float = 0.4
  seed: int = 0

  splits = SPLITS

  def __post_init__(self):
    for name, *bounds in (
      *(('streams', 1), ('steps', 1), ('grid', 4)),
      *(('colors', 1, len(COLORS)), ('color_change', 0, 1), ('easy', 0, 1)),
    ):
      labeled.check_setting(
        f'object_collision.ObjectCollision.{name}', getattr(self, name), *bounds
      )
    if self.grid % 2:
      raise ValueError(
        f'grid must be even, to have quarters, got {self.grid}. Set GRID.'
      )
    if not 0 < self.speed <= self.grid / 4:
      raise ValueError(
        f'speed must be above 0 and at most {self.grid / 4}, got {self.speed}. '
        'Set object_collision.ObjectCollision.speed.'
      )

  @functools.cached_property
  def vocabulary(self) -> Words:
    """Rows, columns, colors, colors asked for, and quarters of the grid."""
    colors = COLORS[: self.colors]
    return Words(
      [
        *(f'r{row}' for row in range(self.grid)),
        *(f'c{column}' for column in range(self.grid)),
        *colors,
        *(f'{color}?' for color in colors),
        *QUARTERS,
      ]
    )

  def _documents(self, split):
    """Makes the documents of a split; a label is the quarter asked for."""
    words_NS8, quarter_NS, _ = self._streams(split)
    labels_NS8 = np.zeros_like(words_NS8)
    first = self.vocabulary.size - len(QUARTERS)
    labels_NS8[:, :, -1] = np.where(quarter_NS < 0, 0, first + quarter_NS)
    N = len(words_NS8)
    return labeled.from_rows(
      split,
      words_NS8.reshape(N, -1),
      labels_NS8.reshape(N, -1),
      rows_per_document=1,
      vocabulary=self.vocabulary,
    )

  def baselines(self, split: str) -> Mapping[str, float]:
    """Returns {name: error rate from 0 to 1} of two trivial predictors.

    `uniform` guesses a random quarter. `last` answers with the quarter of the
    last collision of any colors.
    """
    _, quarter_NS, last_NS = self._streams(split)
    asked_NS = quarter_NS >= 0
    if not asked_NS.any():
      return {}
    return {
      'uniform': 1 - 1 / len(QUARTERS),
      'last': float((quarter_NS != last_NS)[asked_NS].mean()),
    }

  def _streams(self, split: str):
    """Returns what happens in the documents of a split.

    Returns:
      words_NS8, ids of words; and the quarters asked for and of the last
      collision: int64 [N, S], -1 where there was no such collision.
    """
    rows = labeled.split_rows(split, self.streams)
    N, S, C = rows.stop - rows.start, self.steps, self.colors
    draws = Draws(self.seed, SPLITS.index(split))
    place_NO2 = (self.grid - 1) * _uniform(draws, N, _OBJECTS, 2)
    velocity_NO2 = self._velocity(draws, N)
    color_NO = _below(draws, C, N, _OBJECTS)
    met_NCC = np.full((N, C, C), -1)  # Quarter of the last collision.
    latest_NO, last_N = np.full((N, _OBJECTS), -1), np.full(N, -1)
    all_N = np.arange(N)
    words_NS8 = np.empty((N, S, 8), np.int64)
    quarter_NS, last_NS = np.empty((N, S), np.int64), np.empty((N, S), np.int64)
    for step in range(S):
      while (out_NO := self._leaves(place_NO2 + velocity_NO2)).any():
        new_NO2 = self._velocity(draws, N)
        velocity_NO2 = np.where(out_NO[..., None], new_NO2, velocity_NO2)
      place_NO2 = place_NO2 + velocity_NO2
      cell_NO2 = np.rint(place_NO2).astype(np.int64)
      changed_NO = _uniform(draws, N, _OBJECTS) < self.color_change
      new_NO = _below(draws, C, N, _OBJECTS)
      color_NO = np.where(changed_NO, new_NO, color_NO)

      south_N, east_N = (cell_NO2[:, 0] >= self.grid // 2).T.astype(np.int64)
      meets_N = (cell_NO2[:, 0] == cell_NO2[:, 1]).all(1)
      last_N = np.where(meets_N, 2 * south_N + east_N, last_N)
      met_NCC[all_N[meets_N], *color_NO[meets_N].T] = last_N[meets_N]
      latest_NO = np.where(meets_N[:, None], color_NO, latest_NO)

      is_easy_N = (_uniform(draws, N) < self.easy) & (last_N >= 0)
      asked_NO = _below(draws, C, N, _OBJECTS)
      asked_NO = np.where(is_easy_N[:, None], latest_NO, asked_NO)
      seen_NO3 = np.concatenate(
        [
          cell_NO2 + (1, 1 + self.grid),
          color_NO[..., None] + 1 + 2 * self.grid,
        ],
        2,
      )
      words_NS8[:, step, :6] = seen_NO3.reshape(N, 6)
      words_NS8[:, step, 6:] = asked_NO + 1 + 2 * self.grid + C
      quarter_NS[:, step] = met_NCC[all_N, *asked_NO.T]
      last_NS[:, step] = last_N
    return words_NS8, quarter_NS, last_NS

  def _velocity(self, draws, N):
    # The sum of twelve uniform numbers is nearly normal, with a variance of 1,
    # and the same on all machines, which logarithms are not.
    sum_NO2 = _uniform(draws, N, _OBJECTS, 2, 12).sum(-1)
    return self.speed * (sum_NO2 - 6)

  def _leaves(self, place_NO2):
    return ((place_NO2 <= 0) | (place_NO2 >= self.grid - 1)).any(-1)


def _uniform(draws: Draws, *shape: int) -> np.ndarray:
  return draws.between_0_and_1(int(np.prod(shape))).reshape(shape)


def _below(draws: Draws, end: int, *shape: int) -> np.ndarray:
  return draws.below(end, int(np.prod(shape))).reshape(shape)
