"""Rows become documents with all their words, each with its label."""

import numpy as np
import pytest

from meliad_rec.data.synthetic import labelled
from meliad_rec.data.vocabulary import Words

WORDS = Words(['a', 'bc', 'é'])
TOKENS = np.array([[1, 0, 2], [3, 3, 3], [0, 0, 1], [2, 1, 0], [0, 3, 0]])
LABELS = np.array([[0, 0, 3], [1, 0, 2], [0, 0, 0], [3, 3, 0], [0, 1, 0]])


@pytest.mark.parametrize('per', [1, 2, 5, 9])
def test_rows_follow_one_another(per):
  made = labelled.documents('dev', TOKENS, LABELS, per, WORDS)
  assert made.names == [f'dev-{i}' for i in range(len(made))]
  for i, first in enumerate(range(0, 5, per)):
    rows = range(first, min(first + per, 5))
    real = [(n, x) for n in rows for x in range(3) if TOKENS[n, x]]
    tokens = [TOKENS[place] for place in real]
    labels = [LABELS[place] for place in real]
    begin, end = made.starts[i : i + 2]
    assert made[i].tolist() == tokens
    assert made.labels[begin:end].tolist() == labels
    text = WORDS.decode(made[i])
    assert made.bytes_[i] == len(text.encode())
    assert made.words[i] == len(text.split())
  assert len(made) == i + 1


def test_many_documents_are_measured_as_few_are(monkeypatch):
  whole = labelled.documents('dev', TOKENS, LABELS, 1, WORDS)
  monkeypatch.setattr(labelled, '_DOCUMENTS', 2)
  lies = whole.tokens, whole.starts, whole.labels
  made = labelled.laid('dev', *lies, WORDS)
  assert made.bytes_.tolist() == whole.bytes_.tolist()
  assert made.identity == whole.identity and made.names == whole.names


@pytest.mark.parametrize('in_train', [1, 7, 30])
def test_splits_share_all_rows_out(in_train):
  every = np.arange(labelled.total(in_train))
  parts = [
    every[labelled.rows_of(split, in_train)]
    for split in ('train', 'validation', 'test')
  ]
  assert np.concatenate(parts).tolist() == every.tolist()
  tenth = max(in_train // 10, 1)
  assert [len(part) for part in parts] == [in_train, tenth, tenth]


@pytest.mark.parametrize(
  ('call', 'told'),
  [
    (lambda: labelled.rows_of('dev', 3), "no split 'dev'; it has train"),
    (lambda: labelled.check('a.B.c', 0, 1), '^c is 0; .* 1 or more. Set a.B.c'),
    (lambda: labelled.check('a.B.c', 6, 1, 5), '^c is 6; it must be from 1 to'),
  ],
)
def test_mistakes(call, told):
  with pytest.raises(ValueError, match=told):
    call()
  labelled.check('a.B.c', 5, 1, 5)
