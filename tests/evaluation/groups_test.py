"""Figures of groups against loops over documents, and their table."""

import numpy as np
import pytest

from meliad_rec.data.documents import Documents
from meliad_rec.data.synthetic import listops
from meliad_rec.data.synthetic.labelled import Draws
from meliad_rec.evaluation import depth
from meliad_rec.evaluation.depth import Depths

STEPS = depth.bracket_steps(listops.VOCABULARY)


def made(labelled=True) -> Depths:
  """Of random expressions, one of them empty, with random steps."""
  rng = np.random.default_rng(0)
  tree = listops.grow(Draws(0), 90, 4, 6)
  tokens, starts, values = listops.write(tree)
  starts = np.insert(starts, 7, starts[7])
  N, count = len(tokens), len(starts) - 1
  labels = np.zeros(N, np.uint8)
  labels[starts[1:] - 1] = 1 + np.insert(values, 7, values[6])
  documents = Documents(
    tokens=tokens,
    starts=starts,
    bytes_=np.ones(count, int),
    words=np.ones(count, int),
    names=[f'{i}' for i in range(count)],
    labels=labels if labelled else None,
  )
  begins = rng.random(N) < 0.5
  begins[starts[:-1]] = True
  right = labels if labelled else tokens
  answers = np.where(rng.random(N) < 0.5, right, 9)
  return Depths(documents, rng.integers(1, 9, N), begins, answers)


def by_hand(depths, chosen):
  """Documents, mean, most and accuracy of these documents."""
  documents, steps, right = depths.documents, [], []
  for i in chosen:
    some, begins, answers = depths.of(i)
    steps += [s for s, first in zip(some, begins, strict=True) if first]
    here = slice(*documents.starts[i : i + 2])
    if documents.labels is None:
      right += list(answers == documents.tokens[here])
    else:
      label = documents.labels[here]
      right += [a == y for a, y in zip(answers, label, strict=True) if y]
  mean = sum(map(int, steps)) / len(steps)
  return len(chosen), mean, max(steps), sum(right) / len(right)


@pytest.mark.parametrize('labelled', [True, False])
def test_all(labelled):
  depths = made(labelled)
  read = np.flatnonzero(depths.documents.lengths)
  assert len(read) == len(depths.documents) - 1
  found = depth.everything(depths)
  assert found.name == 'all'
  assert found[1:] == pytest.approx(by_hand(depths, read))


def test_by_length():
  depths = made()
  lengths = depths.documents.lengths
  found = depth.by_length(depths)
  spans, seen = [], []
  for each in found:
    first, *_, last = [int(n) for n in 2 * each.name.split('-')]
    spans.append((first, last))
    inside = np.flatnonzero((lengths >= first) & (lengths <= last))
    assert each[1:] == pytest.approx(by_hand(depths, inside))
    seen += inside.tolist()
  assert sorted(seen) == np.flatnonzero(lengths).tolist()
  assert spans == sorted(spans)
  assert 2 < len(found) <= 8
  assert spans[0][0] == 1 and spans[-1][1] == lengths.max()


def test_groups_by_length_are_about_as_large():
  lengths = np.arange(1, 81)
  starts = np.concatenate([[0], np.cumsum(lengths)])
  ones, N = np.ones(80, int), starts[-1]
  documents = Documents(np.ones(N, int), starts, ones, ones, ['x'] * 80)
  depths = Depths(documents, np.ones(N), np.ones(N, bool), np.ones(N))
  found = depth.by_length(depths)
  assert [each.documents for each in found] == pytest.approx([10] * 8, abs=1)
  assert found[0].name.startswith('1-')


def test_by_nesting():
  depths = made()
  documents = depths.documents
  found = depth.by_nesting(depths, STEPS)
  seen = 0
  for each in found:
    inside = [
      i
      for i in range(len(documents))
      if len(documents[i]) and listops.nesting(documents[i]) == int(each.name)
    ]
    assert each[1:] == pytest.approx(by_hand(depths, inside))
    seen += len(inside)
  assert seen == len(documents) - 1
  assert [int(each.name) for each in found] == list(range(len(found)))
  assert len(found) > 3


def test_without_right_answers():
  depths = made()
  depths.documents.labels[:] = 0
  assert depth.everything(depths).accuracy is None
  line = depth.table('tokens', [depth.everything(depths)]).splitlines()[1]
  assert line.split()[-1] == '-'


def test_the_table():
  some = [
    depth.Group('1-9', 1200, 2.25, 7, 0.5),
    depth.Group('10', 3, 10.0, 10, None),
  ]
  assert depth.table('tokens', some).splitlines() == [
    'tokens  documents    mean   most  right',
    '   1-9      1,200    2.25      7  50.0%',
    '    10          3   10.00     10      -',
  ]
