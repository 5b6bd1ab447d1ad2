"""Relations by hand, and splits and bins as the published ones."""

import collections
import dataclasses

import numpy as np
import pytest

from meliad_rec.data.dataset import Dataset
from meliad_rec.data.dataset import HasBaselines
from meliad_rec.data.synthetic.logical_inference import BINS
from meliad_rec.data.synthetic.logical_inference import EVERYWHERE
from meliad_rec.data.synthetic.logical_inference import LogicalInference
from meliad_rec.data.synthetic.logical_inference import relation
from meliad_rec.data.synthetic.logical_inference import RELATIONS
from tests.data.synthetic.formulas_test import holds
from tests.data.synthetic.formulas_test import parse
from tests.data.synthetic.formulas_test import WORLDS

TASK = LogicalInference(pairs=5000)
BIN = [f'bin_{place}' for place in range(BINS)]


def pairs(split, task=TASK):
  """The two texts of each pair, and its relation."""
  documents, words = task.documents(split), task.vocabulary
  for i, middle in enumerate(documents.middles):
    tokens, labels = documents.read(i, 0, documents.lengths[i])
    assert not labels[:-1].any()
    sides = []
    for ids in (tokens[:middle], tokens[middle:]):
      start, *text, end = words.decode(ids).split()
      assert (start, end) == ('START', 'END')
      sides.append(' '.join(text))
    yield *sides, words.words[labels[-1] - 1]


@pytest.mark.parametrize('split', ['train', 'validation', 'bin_0', 'bin_7'])
def test_without_ends_the_last_token_has_the_label(split):
  """TLB and GUTLB of the dynamic-halt paper's code; all else is the same."""
  bare = dataclasses.replace(TASK, ends=False)
  assert bare.vocabulary.words == TASK.vocabulary.words[:-2]
  assert bare.baselines(split) == TASK.baselines(split)
  found, words = bare.documents(split), bare.vocabulary
  for i, (left, right, relation_) in enumerate(pairs(split)):
    tokens, labels = found.read(i, 0, found.lengths[i])
    middle = found.middles[i]
    assert words.decode(tokens[:middle]) == left
    assert words.decode(tokens[middle:]) == right
    assert not labels[:-1].any() and words.words[labels[-1] - 1] == relation_
    assert found.bytes_[i] == len(f'{left} {right}')
  assert len(found) == len(TASK.documents(split))


def by_hand(left, right):
  """The relation of two sets of worlds."""
  everything = {*range(64)}
  apart, all_there_is = not left & right, left | right == everything
  if left == right:
    return '='
  if left < right or left > right:
    return '<' if left < right else '>'
  if apart:
    return '^' if all_there_is else '|'
  return 'v' if all_there_is else '#'


@pytest.mark.parametrize('split', ['train', 'validation', 'test'])
def test_labels_are_what_the_words_say(split):
  seen = collections.Counter()
  for *sides, found in pairs(split):
    left, right = (
      {w for w in range(64) if holds(parse(text), WORLDS[w])} for text in sides
    )
    assert 0 < len(left) < 64 and 0 < len(right) < 64
    assert found == by_hand(left, right)
    seen[found] += 1
  assert set(seen) == {*RELATIONS} or split == 'validation'


@pytest.mark.parametrize(
  ('left', 'right', 'found'),
  [
    ({1, 2}, {1, 2}, '='),
    ({1}, {1, 2}, '<'),
    ({1, 2}, {2}, '>'),
    ({*range(10)}, {*range(10, 64)}, '^'),
    ({1}, {2, 5}, '|'),
    ({*range(40)}, {*range(39, 64)}, 'v'),
    ({1, 2}, {2, 3}, '#'),
  ],
)
def test_relations_by_hand(left, right, found):
  assert by_hand(left, right) == found
  sets = (
    np.array([sum(1 << world for world in side)], np.uint64)
    for side in (left, right)
  )
  assert RELATIONS[relation(*sets)[0] - 1] == found


def test_a_bin_is_the_operators_of_the_longer_one():
  together = []
  for place, split in enumerate(BIN):
    for *sides, _ in pairs(split):
      most = max(
        sum(text.split().count(word) for word in ('and', 'or', 'not'))
        for text in sides
      )
      assert min(most, 12) == place
      together.append(sides)
  assert sorted(together) == sorted(sides for *sides, _ in pairs('test'))


@pytest.mark.parametrize('split', ['validation', 'test'])
def test_the_first_pairs_to_evaluate_on_are_of_every_bin(split):
  bins = TASK._bin_N[TASK._split(split)]
  first = np.bincount(bins[: len(bins) // 4], minlength=BINS)
  whole = np.bincount(bins, minlength=BINS)
  assert np.abs(first - whole / 4).max() < 5 * np.sqrt(whole.max() / 4)
  assert (np.diff(bins) < 0).any()


@pytest.mark.parametrize('most', [0, 3, 6])
def test_train_has_85_of_100_of_its_bins_but_every_tenth(most):
  task = LogicalInference(pairs=5000, train_operators=most)
  counts = np.bincount(task._bin_N, minlength=BINS)
  trained = [count * 85 // 100 for count in counts]
  sizes = {split: len(task.documents(split)) for split in task.splits}
  whole = sum(trained[: most + 1])
  assert sizes['train'] == whole - whole // 10
  assert sizes['validation'] == whole // 10
  assert sizes['test'] == sum(counts) - sum(trained)
  assert [sizes[split] for split in BIN] == (counts - trained).tolist()


def test_no_two_pairs_are_the_same():
  every = [
    (a, b)
    for split in ('train', 'validation', 'test')
    for a, b, _ in pairs(split)
  ]
  assert len(every) == len(set(every)) > 1000


def test_protocols_and_vocabulary():
  assert isinstance(TASK, Dataset) and isinstance(TASK, HasBaselines)
  assert TASK.vocabulary.words[:7] == RELATIONS
  assert TASK.vocabulary.size == 1 + 7 + 11 + 2
  documents = TASK.documents('test')
  for i in range(len(documents)):
    text = TASK.vocabulary.decode(documents[i])
    assert documents.bytes_[i] == len(text)
    assert documents.words[i] == len(text.split())


def test_the_same_seed_gives_the_same_pairs():
  of = lambda seed: LogicalInference(5000, seed=seed).documents('test').identity
  assert of(0) == TASK.documents('test').identity != of(1)


def test_pairs_are_these_on_every_machine():
  """Golden: another pair would be other data under the same name."""
  documents = TASK.documents('bin_5')
  assert TASK.vocabulary.decode(documents[50]).startswith(GOLDEN)


GOLDEN = 'START c END START ( c ( or ( not ( ( c ( and a ) ) ( or'


def test_baselines_by_hand():
  (likeliest, _), *_ = collections.Counter(
    found for *_, found in pairs('train')
  ).most_common()
  wrong = [found != likeliest for *_, found in pairs('bin_7')]
  found = TASK.baselines('bin_7')
  assert found['uniform'] == pytest.approx(6 / 7)
  assert found['likeliest'] == pytest.approx(np.mean(wrong))


# Pairs in bins 1 to 12 of the published files.
PUBLISHED = [2729, 14649, 27356, 35734, 40179, 38768]
PUBLISHED += [31378, 22309, 14864, 9625, 5758, 5684]


def test_bins_are_as_large_as_the_published_ones():
  """Within 3 standard deviations; splits are nearly as large then."""
  task = LogicalInference()
  found = np.bincount(task._bin_N)
  assert found[0] == 36  # All that there are.
  for a, b in zip(found[1:], PUBLISHED, strict=True):
    assert abs(a - b) < 3 * np.sqrt(a + b)
  sizes = [len(task.documents(split)) for split in ('train', 'validation')]
  np.testing.assert_allclose(sizes, [121_977, 13_552], rtol=0.005)
  sides = lambda split: np.maximum(
    task.documents(split).middles,
    task.documents(split).lengths - task.documents(split).middles,
  )
  assert sides('train').max() == 37 + 2
  assert sides('test').max() <= 90 + 2
  always = task.baselines('train')['likeliest']
  assert 0.44 < always < 0.5
  labels = task.documents('train').labels
  hash_sign = RELATIONS.index('#') + 1
  assert np.mean(labels[labels > 0] != hash_sign) == pytest.approx(always)


@pytest.mark.parametrize(
  ('make', 'told'),
  [
    (lambda: LogicalInference(pairs=0), '^pairs is 0; it must be 1 or more'),
    (
      lambda: LogicalInference(train_operators=13),
      '^train_operators is 13; it must be from 0 to 12. Set logical_inference',
    ),
    (lambda: TASK.documents('bin_13'), "no split 'bin_13'"),
    (
      lambda: LogicalInference(pairs=9).documents('bin_12'),
      '^None of 9 drawn pairs is one of bin_12; set logical_inference.Logic',
    ),
  ],
)
def test_mistakes(make, told):
  with pytest.raises(ValueError, match=told):
    make()


def test_everywhere_is_all_worlds():
  assert int(EVERYWHERE) == sum(1 << world for world in range(64))
