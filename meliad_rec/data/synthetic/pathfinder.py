"""Pathfinder: does a dashed path connect the two discs of an image?

An image has two long paths of dashes, shorter ones that distract, and two
discs. In class 1 the discs are at both ends of one long path, in class 0 each
is at an end of another one. Their places say nothing about the class: each
image has paths for both classes between the same discs, before one of the
classes is drawn. The document of an image has its gray levels, row by row, and
its class is the label of the last token.

Linsley et al. 2018 and Tay et al. 2021 (Long Range Arena), whose images of
32 x 32 points have the same numbers and sizes of dashes and discs. The curves
of the paths are a choice of this library, so images resemble theirs without
being the same; `lra.PathfinderFiles` reads theirs.

Letters of this file: N images, L dashes of a path, P points of a patch.
"""

from collections.abc import Iterator
import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from meliad_rec.data.lra import GrayImages
from meliad_rec.data.synthetic import labeled
from meliad_rec.data.synthetic.labeled import Draws

_DASH, _GAP = 2.0, 1.0  # Length of a dash, and of the gap after it.
_THICK, _RADIUS = 0.5, 1.5  # Half of a dash's thickness, radius of a disc.
_DASH_LEVEL, _DISC_LEVEL = 191, 255
_ROOM = 2.0  # Distance that dashes of different paths keep.
_APART = 5.0  # Distance that the discs keep.
_EDGE = 2  # Dashes keep this distance from the edge.
_BORDER = 8  # Points around the image, for patches that reach over its edge.
_TRIES = 60  # A path that finds no way begins this many times.
_CHUNK = 1024  # Images drawn at once.
_TURNS = 64  # Directions; a dash turns by up to _CURVE of them.
_CURVE = 10
# Rounded, so that images are the same on all machines.
_angle = np.arange(_TURNS) * 2 * np.pi / _TURNS
_DIRECTIONS = np.rint(2**20 * np.stack([np.sin(_angle), np.cos(_angle)], 1))
_DIRECTIONS /= 2**20
# Points around the middle of a dash or disc: row and column.
_OFFSET_P2 = np.stack(np.mgrid[-3:4, -3:4], -1).reshape(-1, 2)


class _Path(NamedTuple):
  """A path in each of N images.

  Attributes:
    center_NL2: center of each dash: row and column.
    turn_NL: direction of each dash, an index of _DIRECTIONS.
    drawn_N: whether a path was found in an image.
  """

  center_NL2: np.ndarray
  turn_NL: np.ndarray
  drawn_N: np.ndarray


@dataclasses.dataclass(frozen=True)
class Pathfinder(GrayImages):
  """The Pathfinder task, with splits train, validation and test.

  Both classes are equally likely.

  Attributes:
    images: number of images in train; validation and test have an eighth each.
      The Long Range Arena has 160,000.
    contour_length: dashes of a long path. 14 are the hard images of the Long
      Range Arena; 9 and 6 are easier. A third as many are in the others, and
      all of these together have about 20.
    size: rows and columns of an image.
    seed: seed of the images.
    ends: whether an image has START and END.

  Raises:
    ValueError: a setting is out of its range.
  """

  images: int = 160_000
  contour_length: int = 14
  size: int = 32
  seed: int = 0
  ends: bool = True

  def __post_init__(self):
    for name, *bounds in (
      *(('images', 1), ('size', 16, 128)),
      ('contour_length', 3, self.size // 2),
    ):
      labeled.check_setting(
        f'pathfinder.Pathfinder.{name}', getattr(self, name), *bounds
      )

  def baselines(self, split: str) -> dict[str, float]:
    """Returns {'uniform': 0.5}, the error rate of guessing."""
    del split
    return {'uniform': 0.5}

  def examples(self, split):
    count = self.images if split == 'train' else max(self.images // 8, 1)
    draws, number = Draws(self.seed, self.splits.index(split)), 0
    while number < count:
      for levels, label in self._drawn(draws):
        if number < count:
          yield f'{split}-{number}', [levels.ravel() + np.int32(1)], label
        number += 1

  def _drawn(self, draws: Draws) -> Iterator[tuple[np.ndarray, int]]:
    """Yields the gray levels and the class of some images."""
    side = self.size + 2 * _BORDER
    blocked_CNSS = np.zeros((2, _CHUNK, side, side), bool)
    levels_NSS = np.zeros((_CHUNK, side, side), np.uint8)
    long = functools.partial(self._path, draws, dashes=self.contour_length)
    # Class 1: a path joins the discs. Class 0: another one begins at each.
    joining = long(blocked_CNSS[1])
    discs = joining.center_NL2[:, 0], joining.center_NL2[:, -1]
    of_class = (
      [long(blocked_CNSS[0], start_N2=center_N2) for center_N2 in discs],
      [joining, long(blocked_CNSS[1])],
    )
    # If only the class that is drawn had to fit, the discs would tell it.
    fits_N = ((discs[0] - discs[1]) ** 2).sum(1) >= _APART**2
    for path in *of_class[0], *of_class[1]:
      fits_N &= path.drawn_N
    if not fits_N.any():
      raise ValueError(
        f'Images of {self.size} x {self.size} points have no room for two '
        f'paths of {self.contour_length} dashes. Decrease '
        'pathfinder.Pathfinder.contour_length or increase '
        'pathfinder.Pathfinder.size.'
      )
    label_N = draws.below(2, _CHUNK)
    blocked_NSS = blocked_CNSS[label_N, np.arange(_CHUNK)]
    short = max(self.contour_length // 3, 1)
    others = [self._path(draws, blocked_NSS, short) for _ in range(20 // short)]
    for label, paths in enumerate(of_class):
      for path in paths:
        drawn_N = fits_N & (label_N == label)
        _draw_path(levels_NSS, path._replace(drawn_N=drawn_N))
    for path in others:
      _draw_path(levels_NSS, path)
    for center_N2 in discs:
      _draw(levels_NSS, center_N2, np.zeros(2), _RADIUS, _DISC_LEVEL)
    inner = slice(_BORDER, -_BORDER)
    for i in np.flatnonzero(fits_N):
      yield levels_NSS[i, inner, inner], int(label_N[i])

  def _path(
    self, draws: Draws, blocked_NSS: np.ndarray, dashes: int, start_N2=None
  ) -> _Path:
    """Draws a path in each image, and blocks the points around it.

    Args:
      draws: the random numbers.
      blocked_NSS: points where no dash may be; changed.
      dashes: number of dashes L.
      start_N2: center of the first dash. None: anywhere.
    """
    N = len(blocked_NSS)
    whole = _Path(
      np.full((N, dashes, 2), _EDGE + 1.0),
      np.zeros((N, dashes), np.int64),
      np.zeros(N, bool),
    )
    for _ in range(_TRIES):
      todo = np.flatnonzero(~whole.drawn_N)
      if not todo.size:
        break
      start_M2 = None if start_N2 is None else start_N2[todo]
      trial_MSS = blocked_NSS[todo]
      path = self._try_path(draws, trial_MSS, dashes, start_M2)
      found = todo[path.drawn_N]
      blocked_NSS[found] = trial_MSS[path.drawn_N]
      for to, new in zip(whole, path, strict=True):
        to[found] = new[path.drawn_N]
    return whole

  def _try_path(self, draws, blocked_NSS, dashes, start_N2) -> _Path:
    N = len(blocked_NSS)
    place_N2 = start_N2
    if start_N2 is None:
      room = self.size - 2 * _EDGE
      place_N2 = _EDGE + room * draws.between_0_and_1(2 * N).reshape(N, 2)
    turn_N = draws.below(_TURNS, N)
    fits_N = self._fits(blocked_NSS, place_N2, turn_N)
    centers, turns = [place_N2], [turn_N]
    for _ in range(dashes - 1):
      tip_N2 = centers[-1] + _DIRECTIONS[turns[-1]] * _DASH / 2
      place_N2, turn_N = centers[-1], turns[-1]
      open_N = fits_N.copy()
      for _ in range(8):  # Some turns; the first that fits is taken.
        new_N = (turns[-1] + draws.below(2 * _CURVE + 1, N) - _CURVE) % _TURNS
        next_N2 = tip_N2 + _DIRECTIONS[new_N] * (_GAP + _DASH / 2)
        taken_N = open_N & self._fits(blocked_NSS, next_N2, new_N)
        place_N2 = np.where(taken_N[:, None], next_N2, place_N2)
        turn_N = np.where(taken_N, new_N, turn_N)
        open_N &= ~taken_N
      fits_N &= ~open_N
      # The next dash begins near the end of this one, not of the last.
      going_M = np.flatnonzero(fits_N)
      _block(blocked_NSS, going_M, centers[-1], turns[-1])
      centers.append(place_N2)
      turns.append(turn_N)
    _block(blocked_NSS, np.flatnonzero(fits_N), centers[-1], turns[-1])
    return _Path(np.stack(centers, 1), np.stack(turns, 1), fits_N)

  def _fits(self, blocked_NSS, center_N2, turn_N):
    """Returns whether dashes are in the image and nowhere blocked."""
    fits_N = np.ones(len(center_N2), bool)
    for part in -0.5, 0.0, 0.5:
      point_N2 = center_N2 + part * _DASH * _DIRECTIONS[turn_N]
      inside_N = (point_N2 >= _EDGE) & (point_N2 < self.size - _EDGE)
      at_N2 = np.clip(point_N2, 0, self.size - 1).astype(int) + _BORDER
      free_N = ~blocked_NSS[np.arange(len(at_N2)), *at_N2.T]
      fits_N &= inside_N.all(1) & free_N
    return fits_N


def _draw_path(levels_NSS, path: _Path) -> None:
  images_N = np.flatnonzero(path.drawn_N)
  for center_N2, turn_N in zip(
    path.center_NL2[images_N].swapaxes(0, 1),
    path.turn_NL[images_N].T,
    strict=True,
  ):
    half_N2 = _DIRECTIONS[turn_N] * _DASH / 2
    part = levels_NSS[images_N]
    _draw(part, center_N2, half_N2, _THICK, _DASH_LEVEL)
    levels_NSS[images_N] = part


def _draw(levels_NSS, center_N2, half_N2, radius, level) -> None:
  """Draws a line with round ends, or a disc; edges are smooth."""
  index, distance_NP = _patch(center_N2, half_N2)
  cover_NP = np.clip(radius + 0.5 - distance_NP, 0, 1)
  drawn_NP = np.rint(level * cover_NP).astype(np.uint8)
  levels_NSS[index] = np.maximum(levels_NSS[index], drawn_NP)


def _block(blocked_NSS, images_M, center_N2, turn_N) -> None:
  """Blocks the points around dashes, in some images.

  Each dash is moved to the middle of a point, so that one table has all.
  """
  at_M12 = center_N2[images_M].astype(int)[:, None] + _BORDER
  row_MP, column_MP = np.moveaxis(at_M12 + _OFFSET_P2, 2, 0)
  index = images_M[:, None], row_MP, column_MP
  blocked_NSS[index] |= _blocks()[turn_N[images_M]]


@functools.cache
def _blocks() -> np.ndarray:
  """Returns which points around a dash of each direction are blocked."""
  middle_N2 = np.full((_TURNS, 2), 0.5)
  _, distance_NP = _patch(middle_N2, _DIRECTIONS * _DASH / 2)
  return distance_NP < _ROOM


def _patch(center_N2, half_N2):
  """Returns the points around lines, and their distances from these.

  Args:
    center_N2: center of each line, in points of the image.
    half_N2: from the center to one end.

  Returns:
    The indices (image, row, column) of the points in images with a border, and
    distance_NP.
  """
  point_NP2 = center_N2.astype(int)[:, None] + _OFFSET_P2
  away_NP2 = point_NP2 + 0.5 - center_N2[:, None]
  half_N2 = np.broadcast_to(half_N2, center_N2.shape)
  along_NP = (away_NP2 * half_N2[:, None]).sum(2)
  square_N1 = np.maximum((half_N2**2).sum(1, keepdims=True), 1e-9)
  along_NP = np.clip(along_NP / square_N1, -1, 1)
  away_NP2 = away_NP2 - along_NP[..., None] * half_N2[:, None]
  index_N1 = np.arange(len(center_N2))[:, None]
  index = index_N1, *np.moveaxis(point_NP2 + _BORDER, 2, 0)
  return index, np.sqrt((away_NP2**2).sum(2))
