"""Pathfinder: discs are joined by a path in class 1, and seldom in class 0."""

import numpy as np
import pytest

from meliad_rec.data.synthetic import pathfinder
from meliad_rec.data.synthetic.pathfinder import Pathfinder


def discs_of(image):
  """Returns the points of each disc, [points, 2]."""
  disc = np.argwhere(image == 255)
  is_near = np.square(disc - disc[0]).sum(1) < 9
  return disc[is_near], disc[~is_near]


def joined(image):
  """Whether bright points that touch lead from one disc to the other."""
  bright = np.argwhere(image > 50)
  disc, far = discs_of(image)
  apart = np.abs(bright[:, None] - bright).max(2)
  reached = np.abs(bright - disc[0]).max(1) <= 1
  while True:
    more = reached | (apart[reached] <= 1).any(0)
    if (more == reached).all():
      return bool(reached[(bright == far[-1]).all(1)].all())
    reached = more


def test_discs_are_joined_in_class_1_only():
  task = Pathfinder(images=200, contour_length=6)
  documents = task.documents('train')
  found = {0: [], 1: []}
  for i in range(len(documents)):
    tokens, labels = documents.read(i, 0, 1026)
    assert (tokens[0], tokens[-1]) == (257, 258) and not labels[:-1].any()
    image = tokens[1:-1].reshape(32, 32).astype(int) - 1
    assert image.min() == 0 and image.max() == 255
    found[labels[-1] - 1].append(joined(image))
  assert np.mean(found[1]) == 1
  assert np.mean(found[0]) < 0.25  # A gap or a crossing may look like a path.
  assert min(map(len, found.values())) > 70


@pytest.mark.slow
def test_places_of_discs_do_not_tell_the_class():
  task = Pathfinder(images=4000, contour_length=6)
  features, labels = [], []
  for _, [levels], label in task.examples('train'):
    image = levels.reshape(32, 32) - 1
    one, two = (points.mean(0) for points in discs_of(image))
    to_edges = [np.minimum(at, 31 - at).min() for at in (one, two)]
    distance = np.sqrt(np.square(one - two).sum())
    features.append([1, distance, distance**2, min(to_edges), max(to_edges)])
    labels.append(label)
  features, labels = np.array(features), np.array(labels)
  weights = np.linalg.lstsq(features[::2], 2 * labels[::2] - 1)[0]
  guessed = features[1::2] @ weights > 0
  assert 0.45 < (guessed == labels[1::2]).mean() < 0.55


def test_images_without_room_for_two_paths_are_an_error(monkeypatch):
  monkeypatch.setattr(pathfinder, '_CHUNK', 32)
  task = Pathfinder(images=1, contour_length=8, size=16)
  with pytest.raises(ValueError, match=r'(?s)contour_length .*\.size'):
    next(task.examples('train'))


def test_splits_differ_and_long_paths_fill_images(monkeypatch):
  monkeypatch.setattr(pathfinder, '_CHUNK', 64)
  task = Pathfinder(images=16, contour_length=9, ends=False)
  sizes = [len(task.documents(split)) for split in task.splits]
  assert sizes == [16, 2, 2]
  validation, test = (task.documents(s).tokens for s in ('validation', 'test'))
  assert validation.size == 2 * 32 * 32 and (validation != test).any()
  assert 0.15 < (validation > 51).mean() < 0.4


@pytest.mark.parametrize(
  ('setting', 'told'),
  [
    ({'images': 0}, 'images must be at least 1'),
    ({'contour_length': 17}, 'contour_length must be from 3 to 16, got 17'),
    ({'size': 8}, 'size must be from 16 to 128'),
  ],
)
def test_mistakes(setting, told):
  with pytest.raises(ValueError, match=told):
    Pathfinder(**setting)
