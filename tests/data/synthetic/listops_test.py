"""Splits are what they are said to be, and like the published file."""

import collections
import dataclasses

import numpy as np
import pytest

from meliad_rec.data.dataset import Dataset
from meliad_rec.data.dataset import HasBaselines
from meliad_rec.data.synthetic import listops
from meliad_rec.data.synthetic.listops import ListOps
from meliad_rec.data.synthetic.listops import nesting
from tests.data.synthetic.listops_trees_test import run

TASK = ListOps(trees=2000, max_length=30, test_trees=40)
ALIKE = 'train', 'validation', 'test', 'test_short'
LENGTHS = [f'length_{n}_{n + 100}' for n in range(200, 1000, 100)]


def texts(split, task=TASK):
  documents = task.documents(split)
  return [documents[i].tobytes() for i in range(len(documents))]


@pytest.mark.parametrize('split', TASK.splits)
def test_the_end_has_the_value_for_its_label(split):
  documents = TASK.documents(split)
  assert documents.labels[documents.starts[1:] - 1].all()
  assert (documents.labels > 0).sum() == len(documents)
  for i in range(len(documents)):
    tokens, labels = documents.read(i, 0, documents.lengths[i])
    text = TASK.vocabulary.decode(tokens)
    start, *words, end = text.split()
    assert (start, end) == ('START', 'END')
    value, deep = run(words)
    assert TASK.vocabulary.words[labels[-1] - 1] == str(value)
    assert nesting(tokens) == deep
    assert documents.bytes_[i] == len(text)
    assert documents.words[i] == len(words) + 2


@pytest.mark.parametrize('split', ['train', 'validation', 'args_5'])
def test_without_ends_the_last_token_has_it(split):
  """TLB and GUTLB of the dynamic-halt paper's code; all else is the same."""
  bare = dataclasses.replace(TASK, ends=False)
  assert bare.vocabulary.words == TASK.vocabulary.words[:-2]
  assert bare.baselines(split) == TASK.baselines(split)
  found, whole = bare.documents(split), TASK.documents(split)
  assert len(found) == len(whole)
  for i in range(len(found)):
    tokens, labels = found.read(i, 0, found.lengths[i])
    in_ends, of_end = whole.read(i, 0, whole.lengths[i])
    np.testing.assert_array_equal(tokens, in_ends[1:-1])
    assert labels[-1] == of_end[-1] and not labels[:-1].any()
    assert found.bytes_[i] == len(bare.vocabulary.decode(tokens))


def test_counts_and_protocols():
  assert isinstance(TASK, Dataset) and isinstance(TASK, HasBaselines)
  beyond = [*LENGTHS, 'args_5', 'args_10', 'args_15', 'lra']
  assert TASK.splits == (*ALIKE, *beyond)
  whole = ListOps(trees=2000, max_length=10**6, test_trees=1)
  sizes = [len(whole.documents(split)) for split in ALIKE]
  assert sizes == [1780, 20, 200, 200]
  assert texts('test', whole) == texts('test')
  for split in set(ALIKE) - {'test'}:
    fitting = [text for text in texts(split, whole) if len(text) <= 2 * 32]
    assert texts(split) == fitting
  assert max(map(len, texts('test'))) > 2 * 32
  assert {len(TASK.documents(split)) for split in beyond} == {40}


@pytest.mark.parametrize('split', LENGTHS)
def test_lengths_are_between_the_bounds(split):
  _, a, b = split.split('_')
  lengths = TASK.documents(split).lengths - 2
  assert int(a) < lengths.min() and lengths.max() < int(b)
  assert np.ptp(lengths) > 50


@pytest.mark.parametrize(
  ('split', 'args', 'deepest', 'shortest', 'longest'),
  [
    ('args_5', 5, 8, 100, 1000),
    ('args_10', 10, 8, 100, 1000),
    ('args_15', 15, 8, 100, 1000),
    ('lra', 10, 9, 501, 1999),
  ],
)
def test_arguments_and_depth(split, args, deepest, shortest, longest):
  documents = TASK.documents(split)
  lengths = documents.lengths - 2
  assert shortest <= lengths.min() and lengths.max() <= longest
  most = 0
  for i in range(len(documents)):
    assert nesting(documents[i]) <= deepest
    counts = [0]
    for word in TASK.vocabulary.decode(documents[i]).split()[1:-1]:
      if word == ']':
        most = max(most, counts.pop())
      else:
        counts[-1] += 1
        if word[0] == '[':
          counts.append(0)
  assert most == args


def test_settings_of_train_hold_for_its_tests_and_lengths():
  task = ListOps(trees=300, max_args=3, max_depth=9, test_trees=5)
  for split in ('train', 'test', 'length_200_300'):
    documents = task.documents(split)
    deepest = max(
      map(nesting, map(documents.__getitem__, range(len(documents))))
    )
    assert deepest <= 8
  assert task.documents('train').lengths.max() <= 100 + 2


def test_no_two_expressions_are_the_same():
  counts = collections.Counter()
  for split in set(TASK.splits) - {'test_short'}:
    counts.update(texts(split))
  assert set(counts.values()) == {1}
  assert set(texts('test_short')) < set(texts('test'))


def test_the_same_seed_gives_the_same_expressions():
  for split in ('train', 'test', 'lra'):
    identity = TASK.documents(split).identity
    of = lambda seed: ListOps(2000, 5, 20, 30, 40, seed).documents(split)
    assert of(0).identity == identity != of(1).identity


def test_expressions_are_these_on_every_machine():
  """Golden: another expression would be other data under the same name."""
  for split, text in GOLDEN.items():
    found = TASK.vocabulary.decode(TASK.documents(split)[1])
    assert found.startswith(text)


GOLDEN = {
  'train': 'START [SM 9 3 [MED [SM 8 4 ] 8 4 9 ] 1 ] END',
  'test': 'START [SM 2 7 1 4 ] END',
  'length_900_1000': 'START [MIN [MAX [MAX 1 5 3 [MED 7 1 [SM [MED 0 [MIN ',
  'lra': 'START [SM 2 2 9 9 5 [MIN 3 [SM 1 3 ] [MED 8 7 7 9 6 1 ] [MAX ',
}


def test_baselines_by_hand():
  labels = TASK.documents('train').labels
  counts = np.bincount(labels[labels > 0])
  assert len(counts) == 11
  wrong = [
    label != counts.argmax() for label in TASK.documents('lra').labels if label
  ]
  found = TASK.baselines('lra')
  assert found == {'uniform': 0.9, 'likeliest': pytest.approx(np.mean(wrong))}


# Of each 10,000 lines of the published file, those of one operator with 2, 3,
# 4 and 5 digits; the mean length of all.
FLAT = {2: 51, 3: 423, 4: 860, 5: 759}
MEAN_LENGTH = 42.8


def test_the_published_file_is_like_it():
  """Within 3 standard deviations."""
  whole = ListOps(max_length=10**6)
  splits = [whole.documents(split) for split in ('train', 'validation', 'test')]
  assert [len(each) for each in splits] == [89_000, 1000, 10_000]
  lengths = np.concatenate([each.lengths for each in splits]) - 2
  flat = collections.Counter()
  for each in splits:
    for i in np.flatnonzero(each.lengths - 2 <= 7):
      text = whole.vocabulary.decode(each[i])
      if text.count('[') == 1:
        flat[text.count(' ') - 3] += 1
  for arguments, count in FLAT.items():
    assert abs(flat[arguments] / 10 - count) < 3 * np.sqrt(count)
  spread = lengths.std() / np.sqrt(10_000)
  assert abs(lengths.mean() - MEAN_LENGTH) < 3 * spread
  assert np.mean(lengths <= 100) == pytest.approx(0.894, abs=0.005)


def test_so_many_are_left_of_the_published_splits():
  """Theirs has 1,000 to validate with, of any length."""
  found = {split: len(ListOps().documents(split)) for split in ALIKE}
  assert found == {
    'train': 79_501,
    'validation': 891,
    'test': 10_000,
    'test_short': 8919,
  }
  theirs = len(ListOps(max_length=10**6).documents('validation'))
  assert theirs == 1000


def test_of_long_expressions_fewer_are_drawn_at_once(monkeypatch):
  counts, grow = [], listops.grow

  def counted(draws, count, *sizes):
    counts.append(count)
    return grow(draws, count, *sizes)

  monkeypatch.setattr(listops, 'grow', counted)
  assert len(ListOps(trees=300, max_args=10).documents('test')) == 30
  assert len(ListOps(trees=300).documents('test')) == 30
  assert max(counts[:-1]) < 3000 and counts[-1] == 2**16


@pytest.mark.parametrize(
  ('make', 'told'),
  [
    (lambda: ListOps(trees=2), '^trees is 2; it must be 3 or more'),
    (lambda: ListOps(max_args=1), 'Set listops.ListOps.max_args'),
    (lambda: ListOps(max_args=10, max_depth=1800), ' have inf words in the'),
    (lambda: ListOps(max_args=15), '^Expressions of up to 15 .* words in the'),
    (lambda: TASK.documents('dev'), "no split 'dev'"),
    (
      lambda: ListOps(trees=400, max_length=1, seed=1).documents('validation'),
      '^No expression of validation is of 1 words or .* listops.ListOps.trees',
    ),
    (
      lambda: ListOps(max_args=2, max_depth=2).documents('train'),
      '^100000 different .* Set listops.ListOps.max_args or',
    ),
    (
      lambda: ListOps(max_depth=4).documents('length_600_700'),
      '^No expression .* from 601 to 699 words; set listops.ListOps.max_args',
    ),
  ],
)
def test_mistakes(make, told):
  with pytest.raises(ValueError, match=told):
    make()
