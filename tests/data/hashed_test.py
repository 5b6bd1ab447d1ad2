"""Documents without splits: each in one, by its name alone."""

import collections

import pytest

from meliad_rec.data.splits import hashed
from meliad_rec.data.splits import split_of

NAMES = [f'{i}.txt' for i in range(2000)]


def test_a_twentieth_goes_to_each_and_names_alone_decide(caplog):
  caplog.set_level('INFO')
  found = hashed(NAMES, 'here', '')
  assert list(found) == NAMES
  counts = collections.Counter(found.values())
  assert counts['train'] / 2000 == pytest.approx(0.9, abs=0.02)
  assert counts['test'] / 2000 == pytest.approx(0.05, abs=0.015)
  told = 'here comes in no splits: of 2000 documents, {validation} go to '
  assert told.format(**counts) in caplog.text
  # Golden: another rule would mix what was trained on into the test.
  assert [split_of(name) for name in ('ctypes', 'gettext', 'json')] == [
    'validation',
    'test',
    'train',
  ]


def test_a_document_stays_where_it_is_when_others_come_or_go():
  found = hashed(NAMES, '', '')
  fewer = hashed(NAMES[:100] + NAMES[:99:-3], '', '')
  assert fewer == {name: found[name] for name in fewer}


@pytest.mark.parametrize('first', range(40))
def test_of_few_documents_each_split_has_one(first):
  few = hashed(NAMES[first : first + 3], '', '')
  assert sorted(few.values()) == ['test', 'train', 'validation']
  assert few == hashed(NAMES[first : first + 3][::-1], '', '')


def test_fewer_than_three_are_too_few():
  with pytest.raises(ValueError, match='x holds 2 documents, too .*; do it.'):
    hashed(NAMES[:2], 'x', 'do it')
