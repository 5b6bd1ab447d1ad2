"""Flip-flop: reads return the last write; sizes and shares of each split."""

import dataclasses

import numpy as np
import pytest

from meliad_rec.data.synthetic.flip_flop import draw
from meliad_rec.data.synthetic.flip_flop import FlipFlop
from meliad_rec.data.synthetic.labeled import Draws
from tests.data.synthetic.spelled import spelled

TASK = FlipFlop(sequences=60, length=40, test_sequences=20)
POOLS = ['test'] + [
  f'test_{p}_{t}' for p in ('0.1', '0.8', '0.98') for t in (40, 80)
]
PARTS = [split.replace('test', 'validation') for split in POOLS[1:]]


def by_hand(words):
  """The label of each word, with one bit of memory."""
  labels, memory = [], None
  for word, bit in zip(words[0::2], words[1::2], strict=True):
    assert word in 'wir' and bit in '01'
    if word == 'w':
      memory = bit
    if word == 'r':
      assert bit == memory
    labels += [bit if word == 'r' else None, None]
  return labels


def test_labels_are_the_last_write():
  lasts = [f'{split}_last' for split in POOLS]
  assert TASK.splits == ('train', 'validation', *POOLS, *lasts, *PARTS)
  for split in TASK.splits:
    for words, labels in spelled(TASK, split):
      expected = by_hand(words)
      assert words[0] == 'w' and words[-2] == 'r'
      if split.endswith('_last'):
        expected = [None] * (len(words) - 2) + expected[-2:]
      assert labels == expected


def test_counts():
  assert FlipFlop() == FlipFlop(160_000, 512, 0.8, 10_000)  # As published.
  lengths = lambda split: TASK.documents(split).lengths.tolist()
  assert lengths('train') == [40] * 60
  # One sequence of each of the seven settings in turn.
  assert lengths('validation') == [40, 40, 80, 40, 80, 40, 80] * 2
  for split in POOLS:
    assert lengths(split) == [80 if split.endswith('_80') else 40] * 20
    last = TASK.documents(f'{split}_last')
    np.testing.assert_array_equal(last.tokens, TASK.documents(split).tokens)


def test_validation_has_six_or_seven_parts():
  """Seven in the authors' code, six in section 6.6 of the paper."""
  texts = lambda task, split: [
    ' '.join(words) for words, _ in spelled(task, split)
  ]
  six = dataclasses.replace(TASK, validation_like_train=False)
  parts = [texts(TASK, part) for part in PARTS]
  # One sequence of each part in turn.
  in_turn = [
    text for one_of_each in zip(*parts, strict=True) for text in one_of_each
  ]
  assert texts(six, 'validation') == in_turn and len(in_turn) == 6 * 2
  seven = texts(TASK, 'validation')
  assert len(seven) == 7 * 2 and [*seven[1:7], *seven[8:]] == in_turn
  for split in 'train', 'test_0.98_80', *PARTS:
    documents = six.documents(split)
    assert documents.identity == TASK.documents(split).identity


# Reads in a sequence of 512, including the last one; measured elsewhere.
READS = {0.1: 115, 0.98: 3.5}


@pytest.mark.parametrize('ignore', READS)
def test_instructions_have_the_stated_shares(ignore):
  made_NP = draw(Draws(0), 4000, 256, ignore)
  inner_NP = made_NP[:, 1:-1]
  shares = [(1 - ignore) / 2, ignore, (1 - ignore) / 2]
  for instruction, share in enumerate(shares):
    found = (inner_NP // 2 == instruction).mean()
    spread = np.sqrt(share * (1 - share) / inner_NP.size)
    assert abs(found - share) < 5 * spread
  written = made_NP[made_NP // 2 < 2] % 2
  assert abs(written.mean() - 0.5) < 5 * 0.5 / np.sqrt(written.size)
  reads = (made_NP // 2 == 2).sum(1).mean()
  assert reads == pytest.approx(READS[ignore], abs=0.5)


@pytest.mark.parametrize(('ignore', 'kinds'), [(0.0, {0, 2}), (1.0, {1})])
def test_shares_of_0_and_1(ignore, kinds):
  made_NP = draw(Draws(0), 5, 30, ignore)
  assert {*(made_NP[:, 1:-1] // 2).ravel().tolist()} == kinds


def test_short_sequences_do_not_repeat():
  """If nearly all bits are ignored, hardly more than 64 sequences exist."""
  small = FlipFlop(sequences=60, length=14, test_sequences=20)
  texts = [
    ''.join(words)
    for split in small.splits
    if not split.endswith('_last') and not split.startswith('validation_')
    for words, _ in spelled(small, split)
  ]
  assert len(set(texts)) == len(texts) == 60 + 14 + 140


def test_a_split_is_drawn_alone_and_does_not_depend_on_others():
  for split in ('test_0.98_80', 'validation', 'train'):
    fresh = dataclasses.replace(TASK)
    identity = fresh.documents(split).identity
    assert identity == TASK.documents(split).identity
    # Training draws no test split.
    assert max(fresh._drawn) <= 7 or split.startswith('test')


@pytest.mark.parametrize('split', ['validation', 'test_0.1_80_last'])
def test_baselines_equal_a_slow_form(split):
  wrong = [
    words[place - 1] != label
    for words, labels in spelled(TASK, split)
    for place, label in enumerate(labels)
    if label
  ]
  assert TASK.baselines(split) == {
    'uniform': 0.5,
    'last_bit': pytest.approx(np.mean(wrong)),
  }
