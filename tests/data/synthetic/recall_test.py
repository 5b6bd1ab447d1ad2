"""Recall: documents ask for their own names."""

import pytest

from meliad_rec.data.synthetic.recall import Recall

TASK = Recall(documents_in_train=30, questions=2, letters=2, countdown=3)


def texts(split, task=TASK):
  documents = task.documents(split)
  return [task.vocabulary.decode(documents[i]) for i in range(len(documents))]


def test_a_document_asks_for_the_name_it_begins_with():
  for text in texts('train'):
    name = text[5:7]
    part = '{} 03 02 01 \n'.format
    assert text == (f'name:{part(name)}name?{part(name)}name?{part(name)}')


def test_no_name_is_in_two_splits_or_twice():
  names = [text[5:7] for split in TASK.splits for text in texts(split)]
  assert len(names) == len(set(names)) == 30 + 3 + 3


def test_a_letter_is_one_of_16():
  letters = {text[5] for text in texts('train', Recall(200, letters=2))}
  assert len(letters) == 16


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: Recall(countdown=100), 'recall.Recall.countdown'),
    (
      lambda: Recall(documents_in_train=-5),
      'got -5..*documents',
    ),
    (lambda: Recall(questions=0), 'got 0. Set recall.Recall.questions'),
    (lambda: Recall(letters=8), 'from 1 to 6, got 8'),
    (lambda: Recall(seed=-1), 'recall.Recall.seed'),
    (
      lambda: Recall(300, letters=2).documents('train'),
      '360 .* letters',
    ),
  ],
)
def test_invalid_settings_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()
