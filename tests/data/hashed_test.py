"""Documents without splits: each in one, by its name alone."""

import pytest

from meliad_rec.data.hashed import hashed

NAMES = [f'{i}.txt' for i in range(60)]


def test_a_twentieth_goes_to_each_and_names_alone_decide(caplog):
  caplog.set_level('INFO')
  split_of = hashed(NAMES, 'here', '')
  assert list(split_of) == NAMES
  found = list(split_of.values())
  assert [found.count(s) for s in ('train', 'validation', 'test')] == [54, 3, 3]
  assert hashed(NAMES[::-1], 'there', '') == split_of
  assert 'here comes in no splits: of 60 documents, 3 each' in caplog.text


def test_of_few_documents_each_split_has_one():
  assert sorted(hashed(NAMES[:3], '', '').values()) == [
    'test',
    'train',
    'validation',
  ]
  with pytest.raises(ValueError, match='x holds 2 documents, too .*; do it.'):
    hashed(NAMES[:2], 'x', 'do it')
