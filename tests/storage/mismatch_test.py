"""Six differences, six sentences."""

import pytest

from meliad_rec.storage.saved_step import check_about
from meliad_rec.storage.saved_step import check_leaves
from meliad_rec.storage.saved_step import CheckpointError

SAVED = {
  'params/a': ((3, 4), 'float32'),
  'params/b': ((4,), 'float32'),
  'step': ((), 'int32'),
}


def without(path):
  return {k: v for k, v in SAVED.items() if k != path}


LEAVES = {
  'missing': (SAVED | {'params/c': ((2,), 'float32')}, 'lacks params/c, which'),
  'extra': (without('params/b'), 'holds params/b, which this model does not'),
  'shape': (
    SAVED | {'params/a': ((3, 5), 'float32')},
    r'params/a with shape \(3, 4\) where this model needs \(3, 5\)',
  ),
  'dtype': (
    SAVED | {'params/b': ((4,), 'bfloat16')},
    'params/b with dtype float32 where this model needs bfloat16',
  ),
}
ABOUT = {
  'tokenizer': 'tokenizer bytes, and this run has sentencepiece:0f; set the',
  'data': 'data d1, and this run has d2; give the source',
}


@pytest.mark.parametrize('kind', LEAVES)
def test_leaves(kind):
  wanted, sentence = LEAVES[kind]
  with pytest.raises(CheckpointError, match=f'^Step 20 of W .*{sentence}'):
    check_leaves('Step 20 of W', SAVED, wanted)


@pytest.mark.parametrize('kind', ABOUT)
def test_about(kind):
  about = {'tokenizer': 'bytes', 'data': 'd1'}
  match = {kind: {'tokenizer': 'sentencepiece:0f', 'data': 'd2'}[kind]}
  with pytest.raises(CheckpointError, match=ABOUT[kind]):
    check_about('Step 20 of W', about, match)


def test_what_agrees_passes():
  check_leaves('Step 20 of W', SAVED, dict(SAVED))
  check_about('W', {'tokenizer': 'bytes', 'data': 'd1'}, {'data': 'd1'})


def test_many_leaves_are_counted():
  wanted = SAVED | {f'new/{i}': ((1,), 'int32') for i in range(8)}
  with pytest.raises(CheckpointError, match='new/2 and 5 more, which'):
    check_leaves('Step 20 of W', SAVED, wanted)


def test_messages_are_one_sentence():
  for wanted, _ in LEAVES.values():
    with pytest.raises(CheckpointError) as caught:
      check_leaves('Step 20 of W', SAVED, wanted)
    text = str(caught.value)
    assert '\n' not in text
    assert text.endswith('.')
