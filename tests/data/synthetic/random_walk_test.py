"""Random walk: labels against a slow walk, and known error rates."""

import numpy as np
import pytest

from meliad_rec.data.dataset import HasBaselines
from meliad_rec.data.synthetic.random_walk import RandomWalk
from meliad_rec.data.synthetic.random_walk import walk

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


@pytest.mark.parametrize('split', TASK.splits)
def test_labels_are_where_the_agent_is(split):
  documents, words = TASK.documents(split), TASK.vocabulary
  for i in range(len(documents)):
    expected = by_hand(words.decode(documents[i]).split(), grid=3)
    _, labels = documents.read(i, 0, len(documents[i]))
    found = [words.words[n - 1] if n else None for n in labels.tolist()]
    assert found == expected


def test_a_reset_opens_each_episode_and_is_not_scored():
  documents = TASK.documents('train')
  assert documents.lengths.tolist() == [4 * 14] * 10
  tokens = documents.tokens.reshape(-1, 14)
  labels = documents.labels.reshape(-1, 14)
  reset, *actions = TASK.vocabulary.encode('RESET F L R').tolist()
  assert (tokens[:, 0] == reset).all() and not labels[:, 0].any()
  assert np.isin(tokens[:, 1:], actions).all() and labels[:, 1:].all()


def test_counts():
  assert isinstance(TASK, HasBaselines)
  assert TASK.vocabulary.size == 1 + 4 + 9
  assert RandomWalk().vocabulary.size == 1 + 4 + 64
  sizes = [len(TASK.documents(split)) for split in TASK.splits]
  assert sizes == [10, 1, 1]


def test_actions_are_uniform():
  tokens = RandomWalk(episodes=900).documents('train').tokens
  counts = np.bincount(tokens)[2:]
  assert np.abs(counts - 30_000).max() < 5 * np.sqrt(30_000)


@pytest.mark.parametrize(('actions', 'floor'), [(100, 0.874), (400, 0.9455)])
def test_error_rates_of_constants_are_the_known_ones(actions, floor):
  """The commonest cell is the start. Another program, over 10,000 episodes,
  measured error rates of 87.4 % and 94.5 %."""
  task = RandomWalk(episodes=1000, actions=actions)
  found = task.baselines('train')
  assert found['uniform'] == 63 / 64
  assert found['likeliest'] == pytest.approx(floor, abs=0.01)
  assert found['likeliest_by_action'] == pytest.approx(floor, abs=0.01)


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


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (
      lambda: RandomWalk(episodes=0),
      'got 0..*RandomWalk.episodes',
    ),
    (lambda: RandomWalk(grid=1), 'got 1..*random_walk.RandomWalk.grid'),
    (
      lambda: RandomWalk(episodes=99, actions=3).documents('test'),
      '117 .* random_walk.RandomWalk.actions',
    ),
  ],
)
def test_invalid_settings_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()
