"""Random walk: labels against a slow walk, and known error rates."""

import numpy as np
import pytest

from meliad_rec.data.synthetic.random_walk import RandomWalk
from meliad_rec.data.synthetic.random_walk import walk
from tests.data.synthetic.spelled import spelled

TASK = RandomWalk(episodes=40, actions=13, grid=3, episodes_per_document=4)


def by_hand(words, grid):
  """The label of each word, one step at a time."""
  turn_left = {'east': 'north', 'north': 'west', 'west': 'south'}
  turn_left['south'] = 'east'
  turn_right = {b: a for a, b in turn_left.items()}
  ahead = {'east': (0, 1), 'north': (-1, 0), 'west': (0, -1), 'south': (1, 0)}
  labels = []
  for word in words:
    match word:
      case 'RESET':
        row, column, heading = 0, 0, 'east'
        labels.append(None)
        continue
      case 'L':
        heading = turn_left[heading]
      case 'R':
        heading = turn_right[heading]
      case 'F':
        down, right = ahead[heading]
        if 0 <= row + down < grid and 0 <= column + right < grid:
          row, column = row + down, column + right
    labels.append(f'{row},{column}')
  return labels


def test_labels_are_where_the_agent_is():
  for split, count in zip(TASK.splits, (10, 1, 1), strict=True):
    documents = [*spelled(TASK, split)]
    assert len(documents) == count
    for words, labels in documents:
      resets = [word == 'RESET' for word in words]
      assert resets == [True, *[False] * 13] * 4
      assert labels == by_hand(words, grid=3)


def test_actions_are_uniform_and_error_rates_of_constants_the_known_ones():
  """The commonest cell is the start. Another program, over 10,000 episodes,
  measured an error rate of 87.4 %."""
  task = RandomWalk(episodes=1000)
  assert task.vocabulary.size == 1 + 4 + 64
  counts = np.bincount(task.documents('train').tokens)[2:]
  assert np.abs(counts - 100_000 / 3).max() < 5 * np.sqrt(100_000 / 3)
  found = task.baselines('train')
  assert found['uniform'] == 63 / 64
  assert found['likeliest'] == pytest.approx(0.874, abs=0.01)
  assert found['likeliest_by_action'] == pytest.approx(0.874, abs=0.01)


def test_baselines_equal_a_slow_form():
  """Commonest cells of train, error rates of the split."""
  train_NT, test_NT = (
    walk(TASK._actions[rows], 3) for rows in (slice(40), slice(44, 48))
  )
  places, counts = np.unique(train_NT, return_counts=True)
  always = places[counts.argmax()]
  wrong = []
  for t in range(13):
    here, often = np.unique(train_NT[:, t], return_counts=True)
    wrong.append(np.mean(test_NT[:, t] != here[often.argmax()]))
  found = TASK.baselines('test')
  assert found['likeliest'] == pytest.approx(np.mean(test_NT != always))
  assert found['likeliest_by_action'] == pytest.approx(np.mean(wrong))
