"""Flip-flop: reads return the last write; sizes and shares of each split."""

import numpy as np
import pytest

from meliad_rec.data.dataset import HasBaselines
from meliad_rec.data.synthetic.flip_flop import draw
from meliad_rec.data.synthetic.flip_flop import FlipFlop
from meliad_rec.data.synthetic.labeled import Draws

TASK = FlipFlop(sequences=60, length=40, test_sequences=20)
POOLS = ['test'] + [
  f'test_{p}_{t}' for p in ('0.1', '0.8', '0.98') for t in (40, 80)
]


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


@pytest.mark.parametrize('split', TASK.splits)
def test_labels_are_the_last_write(split):
  documents, words = TASK.documents(split), TASK.vocabulary
  for i in range(len(documents)):
    text = words.decode(documents[i]).split()
    expected = by_hand(text)
    assert text[0] == 'w' and text[-2] == 'r'
    if split.endswith('_last'):
      expected = [None] * (len(text) - 2) + expected[-2:]
    _, labels = documents.read(i, 0, len(documents[i]))
    found = [words.words[n - 1] if n else None for n in labels.tolist()]
    assert found == expected


def test_counts():
  assert isinstance(TASK, HasBaselines)
  assert TASK.vocabulary.words[:2] == ('0', '1')
  lasts = [f'{split}_last' for split in POOLS]
  assert TASK.splits == ('train', 'validation', *POOLS, *lasts)
  assert len(TASK.documents('train')) == 60
  assert set(TASK.documents('train').lengths) == {40}
  for split in POOLS:
    documents = TASK.documents(split)
    assert len(documents) == 20
    longer = split.endswith('_80')
    assert set(documents.lengths) == {80 if longer else 40}
    np.testing.assert_array_equal(
      documents.tokens, TASK.documents(f'{split}_last').tokens
    )
  # One sequence of each of the seven settings in turn.
  lengths = TASK.documents('validation').lengths.tolist()
  assert lengths == [40, 40, 80, 40, 80, 40, 80] * 2


# Reads in a sequence of 512, including the last one; measured elsewhere.
READS = {0.1: 115, 0.8: 26, 0.98: 3.5}


@pytest.mark.parametrize('ignore', READS)
def test_instructions_have_the_stated_shares(ignore):
  count, pairs = 4000, 256
  made_NP = draw(Draws(0), count, pairs, ignore)
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
  """If nearly all are ignored, there are few more than 64."""
  small = FlipFlop(sequences=60, length=14, test_sequences=20)
  texts = [
    small.documents(split)[i].tobytes()
    for split in small.splits
    if not split.endswith('_last')
    for i in range(len(small.documents(split)))
  ]
  assert len(set(texts)) == len(texts) == 60 + 14 + 140


def test_a_split_does_not_depend_on_splits_used_before():
  for split in ('test_0.98_80', 'validation', 'train'):
    fresh = FlipFlop(sequences=60, length=40, test_sequences=20)
    identity = fresh.documents(split).identity
    assert identity == TASK.documents(split).identity


def test_training_draws_no_test_split():
  task = FlipFlop(sequences=60, length=40, test_sequences=20)
  task.documents('train')
  task.documents('validation')
  assert max(task._drawn) == 7


@pytest.mark.parametrize('split', ['train', 'validation', 'test_0.1_80_last'])
def test_baselines_equal_a_slow_form(split):
  documents, wrong = TASK.documents(split), []
  for i in range(len(documents)):
    tokens, labels = documents.read(i, 0, documents.lengths[i])
    wrong += [
      tokens[place - 1] != label for place, label in enumerate(labels) if label
    ]
  assert TASK.baselines(split) == {
    'uniform': 0.5,
    'last_bit': pytest.approx(np.mean(wrong)),
  }


@pytest.mark.slow
def test_the_published_size():
  task = FlipFlop()
  documents = task.documents('train')
  assert len(documents) == 160_000 and len(documents.tokens) == 81_920_000
  assert len(task.documents('validation')) == 7000
  assert len(task.documents('test_0.98_1024_last')) == 10_000


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: FlipFlop(sequences=0), 'got 0. Set flip_flop.FlipFlop.sequences'),
    (
      lambda: FlipFlop(length=7),
      'even.* got 7. Set flip_flop.FlipFlop.length',
    ),
    (lambda: FlipFlop(ignore=1.5), 'from 0 to 1, got 1.5'),
    (
      lambda: TASK.documents('test_0.5_40'),
      "'test_0.5_40'; it has train",
    ),
    (
      lambda: FlipFlop(sequences=99, length=4).documents('train'),
      '99 .* only 2. .* flip_flop.FlipFlop.length',
    ),
  ],
)
def test_invalid_settings_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()
