"""The task has the facts that are known of the published one."""

import numpy as np
import pytest

from meliad_rec.data.dataset import Dataset
from meliad_rec.data.dataset import HasBaselines
from meliad_rec.data.synthetic.algorithm import Algorithm

TASK = Algorithm(programs=30, statements=8, values=4, programs_per_document=3)


@pytest.fixture(scope='module', params=[3, 5])
def published(request):
  """A fifth of the published size."""
  return Algorithm(programs=2000, variables=request.param)


# Tokens and scored tokens of 10,000 programs of the published generator; how
# often the last value seen is right, the mean of seeds 0 to 5 of this one with
# 10,000 programs each. A plain loop by the same rules gives 0.4705 and 0.4864.
FACTS = {3: (4_305_286, 256_543, 0.4704), 5: (4_307_969, 251_503, 0.4850)}


def test_sizes_and_shares_are_the_published_ones(published):
  documents = published.documents('train')
  tokens, scored, _ = FACTS[published.variables]
  mean = documents.lengths.mean()
  spread = documents.lengths.std() / np.sqrt(len(documents))
  assert abs(mean - tokens / 10_000) < 5 * spread
  counts = np.add.reduceat(documents.labels > 0, documents.starts[:-1])
  spread = counts.std() / np.sqrt(len(documents))
  assert abs(counts.mean() - scored / 10_000) < 5 * spread
  assert np.median(documents.lengths) == pytest.approx(429, abs=3)


def test_answers_are_even(published):
  documents = published.documents('train')
  answers = documents.labels[documents.labels > 0] - published.variables
  shares = np.bincount(answers)[1:] / len(answers)
  assert len(shares) == 10
  # Answers of one program hang together, so more than their number says.
  assert np.abs(shares - 0.1).max() < 0.01


def test_to_repeat_what_was_seen_is_right_as_often_as_known(published):
  found = published.baselines('train')
  assert found['uniform'] == 0.9
  right = FACTS[published.variables][2]
  assert 1 - found['last_seen'] == pytest.approx(right, abs=0.002)


@pytest.mark.parametrize('split', TASK.splits)
def test_the_baseline_by_hand(split):
  """From the words alone."""
  documents, right, asked = TASK.documents(split), 0, 0
  name_of = dict(enumerate(TASK.vocabulary.words, 1))
  for i in range(len(documents)):
    words = TASK.vocabulary.decode(documents[i]).split()
    _, labels = documents.read(i, 0, len(words))
    seen = {}
    for at, word in enumerate(words):
      if word == 'END':
        seen = {}
      if word == '=':
        seen[words[at - 1]] = words[at + 1]
      if word == 'print':
        variable, value = words[at + 1], name_of[labels[at + 2]]
        right += seen[variable] == value
        asked += 1
        seen[variable] = value
  assert asked == (documents.labels > 0).sum()
  assert 1 - TASK.baselines(split)['last_seen'] == pytest.approx(right / asked)


def test_counts_and_protocols():
  assert isinstance(TASK, Dataset) and isinstance(TASK, HasBaselines)
  documents = [TASK.documents(split) for split in TASK.splits]
  assert [len(each) for each in documents] == [10, 1, 1]
  end = TASK.vocabulary.encode('END')[0]
  ends = [(each.tokens == end).sum() for each in documents]
  assert ends == [30, 3, 3]
  assert all(each.tokens[-1] == end for each in documents)


def test_no_two_programs_are_the_same():
  """Of these there are not many more than are asked for."""
  small = Algorithm(programs=150, variables=1, statements=3, values=3)
  texts = [
    small.documents(split)[i].tobytes()
    for split in small.splits
    for i in range(len(small.documents(split)))
  ]
  assert len(texts) == len(set(texts)) == 180


def test_the_same_seed_gives_the_same_programs():
  of = lambda seed: Algorithm(30, 3, 8, 4, 3, seed).documents('test').identity
  assert of(0) == TASK.documents('test').identity
  assert of(1) != of(0)


def test_programs_are_these_on_every_machine():
  """Golden: another program would be other data under the same name."""
  text = TASK.vocabulary.decode(TASK.documents('test')[0])
  assert text.split(' END')[0] == GOLDEN


GOLDEN = (
  'y = 1 ; y ++ ; if y < 2 : y -- ; print y ; '
  'y -- ; print y ; z = 4 ; print z ;'
)


@pytest.mark.parametrize(
  ('make', 'told'),
  [
    (lambda: Algorithm(programs=0), '^programs is 0; it must be 1 or more'),
    (lambda: Algorithm(variables=6), '^variables is 6; it must be from 1 to 5'),
    (lambda: Algorithm(values=1), 'Set algorithm.Algorithm.values'),
    (lambda: TASK.documents('dev'), "no split 'dev'"),
    (
      lambda: Algorithm(variables=1, statements=1).documents('test'),
      r'^12000 different .* gave 10\. Set algorithm\.Algorithm\.statements',
    ),
  ],
)
def test_mistakes(make, told):
  with pytest.raises(ValueError, match=told):
    make()
