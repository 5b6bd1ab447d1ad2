"""Texts in and out: what is added to them, and how they are told."""

import types

import numpy as np
import pytest

from meliad_rec.commands import depth_report
from meliad_rec.data.synthetic import listops
from meliad_rec.data.synthetic.logical_inference import LogicalInference
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.data.vocabulary import Words
from meliad_rec.evaluation.depth import Depths
from meliad_rec.models import pooling
from meliad_rec.models.heads import Classifier
from meliad_rec.models.heads import Matcher

LISTOPS = listops.VOCABULARY
EXPRESSION = '[MAX 2 [MIN 3 ] ]'


def run(vocabulary, head=None, labels=True):
  sequences = 1 if head is None else head.sequences
  model = types.SimpleNamespace(head=head, sequences=sequences)
  return types.SimpleNamespace(
    vocabulary=vocabulary,
    labels=labels,
    forward=types.SimpleNamespace(model=model),
  )


def line(run, text, steps, begins, answers):
  documents = depth_report.documents_of(run, [text])
  facts = map(np.asarray, (steps, begins, answers))
  return depth_report.line_of(run, Depths(documents, *facts), 0)


@pytest.mark.parametrize('given', ['{}', 'START {}', '{} END', 'START {} END'])
def test_start_and_end_are_put_around_once(given):
  ids = depth_report.encode(LISTOPS, given.format(EXPRESSION))
  assert LISTOPS.decode(ids) == f'START {EXPRESSION} END'


def test_vocabularies_without_them():
  words = Words(['START', 'a'])
  assert words.decode(depth_report.encode(words, 'a')) == 'START a'
  assert Bytes().decode(depth_report.encode(Bytes(), 'a  b')) == 'a  b'


def test_documents_of_labelled_pairs():
  judges = run(LogicalInference.vocabulary, Matcher(7, pooling.Mean()))
  found = depth_report.documents_of(judges, ['( a and b ) || a', 'a||b'])
  assert found.middles.tolist() == [7, 3]
  assert judges.vocabulary.decode(found[0]) == (
    'START ( a and b ) END START a END'
  )
  assert not found.labels.any()
  for text in ('a', 'a || b || c'):
    with pytest.raises(ValueError, match=r'judges pairs .* \|\| between them'):
      depth_report.documents_of(judges, [text])


def test_documents_of_text():
  found = depth_report.documents_of(run(Bytes(), labels=False), ['a bc', 'd'])
  assert found.labels is None and found.middles is None
  assert (found.lengths.tolist(), found.words.tolist()) == ([4, 1], [2, 1])


def test_texts_that_are_refused():
  with pytest.raises(ValueError, match="holds 'foo', and the vocabulary has"):
    depth_report.documents_of(run(LISTOPS), ['[MAX 2 foo ]'])
  with pytest.raises(ValueError, match='is empty; give it one token or more'):
    depth_report.documents_of(run(Bytes(), labels=False), ['a', ''])


def test_all_halt_together_and_are_judged_as_one():
  judges = run(LISTOPS, Classifier(10, pooling.Mean()))
  begins = [True] + [False] * 7
  answers = [9] * 7 + [4]  # The id of a label is that of a word.
  found = line(judges, EXPRESSION, [5] * 8, begins, answers)
  assert found.labels is None
  assert str(found) == (
    'label 3, 5 steps for all 8 tokens: START [MAX 2 [MIN 3 ] ] END'
  )


def test_each_token_halts_and_is_judged_by_itself():
  judges = run(LISTOPS, Classifier(14, None))
  found = line(
    judges, '[MAX 2 ]', [1, 2, 4, 12, 1], [True] * 5, [1, 11, 1, 2, 3]
  )
  assert str(found).splitlines() == [
    '4.00 steps, 12 at most',
    '    1  0     START',
    '    2  [MIN  [MAX',
    '    4  0       2',
    '   12  1     ]',
    '    1  2     END',
  ]
  assert list(found.levels) == [0, 0, 1, 0, 0]


def test_means_are_over_what_halts():
  judges = run(LISTOPS, Classifier(10, pooling.Last()))
  begins = [True, False, False, True, False]
  found = line(judges, '[MAX 2 ]', [4, 4, 4, 7, 7], begins, [1] * 5)
  assert found.title == 'label 0, 5.50 steps, 7 at most'
  assert not found.together
  assert str(found).count('\n') == 5


def test_text_has_no_labels():
  writes = run(Bytes(), labels=False)
  found = line(writes, 'a\n b', [1, 2, 3, 4], [True] * 4, [0] * 4)
  assert found.labels is None
  assert found.words == ['a', "'\\n'", "' '", 'b']
  assert list(found.levels) == [0] * 4


def test_a_label_that_no_word_has():
  assert depth_report.named(Words(['a', 'b']), 2) == 'b'
  assert depth_report.named(Words(['a', 'b']), 3) == '3'
  assert depth_report.named(Bytes(), 3) == '3'
