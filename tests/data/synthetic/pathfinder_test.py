"""Pathfinder: discs are joined by a path in class 1, and seldom in class 0."""

import numpy as np
import pytest

from meliad_rec.data.synthetic.pathfinder import Pathfinder


def joined(image):
  """Whether bright points that touch lead from one disc to the other."""
  bright, disc = np.argwhere(image > 50), np.argwhere(image == 255)
  far = disc[np.abs(disc - disc[0]).max(1) > 3]
  if not len(far):
    return None  # The discs touch.
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
    is_joined = joined(image)
    if is_joined is not None:
      found[labels[-1] - 1].append(is_joined)
  assert np.mean(found[1]) == 1
  assert np.mean(found[0]) < 0.25  # A gap or a crossing may look like a path.
  assert min(map(len, found.values())) > 70


def test_splits_differ_and_long_paths_fill_images():
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
