"""Names and their distances, by hand."""

import dataclasses

import numpy as np

from meliad_rec.evaluation.compare import compare
from meliad_rec.evaluation.name_distance import Names
from tests.evaluation.compare_test import changed
from tests.evaluation.compare_test import make

#        0         1         2
#        01234567890123456789012345
QUOTED = '\u201cfoo_1\u201d\u2014'  # Quotes and dashes belong to no name.
TEXTS = [
  'def foo_1(a): foo_1 = defs',
  f'{QUOTED} d\u00e9f a\u00e9 \U0001f600 1def def',
]


def test_names_their_tokens_and_distances():
  losses = make(TEXTS)
  names = Names.of(losses)
  spans = list(zip(names.first.tolist(), names.end.tolist(), strict=True))
  text = losses.text.tobytes()
  assert [text[a:b].decode() for a, b in spans] == (
    ['def', 'foo_1', 'foo_1', 'defs', 'foo_1', 'd\u00e9f', 'def', 'def']
  )
  assert names.distance.tolist() == [0, 0, 10, 0, 0, 0, 0, 4]
  by_hand = [losses.nats[a:b].sum(dtype=np.float64) for a, b in spans]
  np.testing.assert_allclose(names.nats(losses), by_hand)


def test_bins_hold_every_name_once():
  names = Names.of(make(['abc' + ' ' * 40 + 'abc abc' + ' ' * 13 + 'abc']))
  found = [(low, high, inside.tolist()) for low, high, inside in names.bins()]
  assert found == [(0, 1, [0]), (1, 16, [2]), (16, 32, [3]), (32, 64, [1])]


def test_bytes_that_are_not_utf_8_belong_to_no_name():
  losses = make(['abc abc d'])
  text = losses.text.copy()
  text[3] = 0xFF
  losses = dataclasses.replace(losses, text=text)
  assert Names.of(losses).distance.tolist() == [0, 4]


def test_no_names():
  assert not len(Names.of(make(['', '1 2'])).first)


def test_the_gain_at_a_distance_is_reported():
  a = make(TEXTS)
  b = changed(a, slice(14, 19), -0.5)  # The second foo_1 of document 0.
  lines = compare(a, b, 3, 'token').split('previous use:\n')[1].splitlines()
  first_use, near = lines[1].split(), lines[2].split()
  assert first_use[:3] == ['first', 'use', '6'] and first_use[-1] == '0.0000'
  assert near[:2] == ['1-15', '2']
  assert float(near[-1]) == np.round(5 * 0.5 / np.log(2) / 2, 4)
