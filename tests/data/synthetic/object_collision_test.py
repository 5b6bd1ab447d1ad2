"""Object collision: its words and labels, by a slow reading of the words."""

import functools

import numpy as np
import pytest

from meliad_rec.data.synthetic.object_collision import ObjectCollision
from meliad_rec.data.synthetic.object_collision import QUARTERS
from tests.data.synthetic.spelled import spelled

GRID, STEPS = 6, 1500
TASK = ObjectCollision(streams=20, steps=STEPS, grid=GRID, colors=3)


@functools.cache
def steps(split):
  """Returns [(words of a step, its label or None)] of each document."""
  found = []
  for words, labels in spelled(TASK, split):
    firsts = range(0, 8 * STEPS, 8)
    assert not any(any(labels[i : i + 7]) for i in firsts)
    found.append([(words[i : i + 8], labels[i + 7]) for i in firsts])
  return found


def test_a_label_is_the_quarter_of_the_last_collision_of_these_colors():
  asked = [0, 0]
  for document in steps('validation'):
    met = {}
    for words, label in document:
      first, second = words[:3], words[3:6]
      if first[:2] == second[:2]:
        south, east = (int(word[1:]) >= GRID // 2 for word in first[:2])
        met[first[2], second[2]] = QUARTERS[2 * south + east]
      colors = words[6].rstrip('?'), words[7].rstrip('?')
      assert label == met.get(colors)
      asked[label is not None] += 1
  assert min(asked) > 50


def test_statistics_are_those_of_the_rules():
  changes, easy, steps_of = [], [], []
  for document in steps('train'):
    latest, before = None, None
    for words, _ in document:
      objects = words[:3], words[3:6]
      if objects[0][:2] == objects[1][:2]:
        latest = [f'{each[2]}?' for each in objects]
      if latest:
        easy.append(words[6:] == latest)
      for place, each in enumerate(objects):
        assert 0 <= int(each[0][1:]) < GRID and 0 <= int(each[1][1:]) < GRID
        if before:
          changes.append(each[2] != before[place][2])
          steps_of.append(int(each[0][1:]) - int(before[place][0][1:]))
      before = objects
  # A new color is the old one in a third of the cases, and a random question is
  # about the last collision in a ninth.
  assert np.mean(changes) == pytest.approx(0.05 * 2 / 3, rel=0.05)
  assert np.mean(easy) == pytest.approx(0.4 + 0.6 / 9, rel=0.05)
  # Velocities that a small grid allows are smaller than those drawn.
  assert 0.25 < np.std(steps_of) < 0.7


def test_trivial_answers():
  found = TASK.baselines('train')
  assert found['uniform'] == 0.75
  wrong = []
  for document in steps('train'):
    last = None
    for words, label in document:
      if words[:2] == words[3:5]:
        south, east = (int(word[1:]) >= GRID // 2 for word in words[:2])
        last = QUARTERS[2 * south + east]
      if label:
        wrong.append(label != last)
  assert found['last'] == pytest.approx(np.mean(wrong))
  assert 0.1 < found['last'] < 0.75


def test_splits_and_seeds_differ():
  first = [
    TASK.documents(split).tokens[:800].tobytes() for split in TASK.splits
  ]
  other = ObjectCollision(20, STEPS, GRID, 3, seed=1)
  first.append(other.documents('train').tokens[:800].tobytes())
  assert len(set(first)) == 4


@pytest.mark.parametrize(
  ('setting', 'told'),
  [
    ({'grid': 7}, 'grid must be even'),
    ({'colors': 11}, 'colors must be from 1 to 10, got 11'),
    ({'easy': 1.5}, 'easy must be from 0 to 1, got 1.5'),
    ({'speed': 0}, 'speed must be above 0'),
    ({'steps': 0}, 'steps must be at least 1'),
  ],
)
def test_mistakes(setting, told):
  with pytest.raises(ValueError, match=told):
    ObjectCollision(**setting)
