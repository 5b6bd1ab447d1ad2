"""The recall task says what it is said to say."""

import numpy as np
import pytest

from meliad_rec.data.dataset import Dataset
from meliad_rec.data.synthetic.recall import Recall

TASK = Recall(documents_in_train=30, questions=2, letters=2, countdown=3)


def texts(split, task=TASK):
  documents = task.documents(split)
  return [task.vocabulary.decode(documents[i]) for i in range(len(documents))]


def test_a_document_asks_for_the_name_it_began_with():
  for text in texts('train'):
    name = text[5:7]
    part = '{} 03 02 01 \n'.format
    assert text == (f'name:{part(name)}name?{part(name)}name?{part(name)}')


def test_no_name_is_in_two_splits_or_twice():
  names = [text[5:7] for split in TASK.splits for text in texts(split)]
  assert len(names) == len(set(names)) == 30 + 3 + 3


def test_same_seed_same_documents():
  again = Recall(documents_in_train=30, questions=2, letters=2, countdown=3)
  other = Recall(30, questions=2, letters=2, countdown=3, seed=1)
  assert texts('test') == texts('test', again)
  assert texts('test') != texts('test', other)


def test_a_letter_is_one_of_16():
  letters = {text[5] for text in texts('train', Recall(200, letters=2))}
  assert len(letters) == 16


def test_counts_and_protocol():
  documents = TASK.documents('validation')
  assert isinstance(TASK, Dataset)
  np.testing.assert_array_equal(documents.bytes_, documents.lengths)
  assert documents.words.tolist() == [3 * 4] * 3


@pytest.mark.parametrize(
  ('make', 'told'),
  [
    (lambda: Recall(countdown=100), 'countdown is 100'),
    (lambda: Recall(documents_in_train=-5), 'documents_in_train is -5; it mu'),
    (lambda: Recall(questions=0), 'questions is 0; .* Set recall.Recall.q'),
    (lambda: Recall(letters=8), 'letters is 8; it must be from 1 to 6'),
    (lambda: Recall(seed=-1), 'seed is -1'),
    (lambda: TASK.documents('dev'), "no split 'dev'; it has train"),
    (lambda: Recall(300, letters=2).documents('train'), '360 documents'),
  ],
)
def test_mistakes(make, told):
  with pytest.raises(ValueError, match=told):
    make()
