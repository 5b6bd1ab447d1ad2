"""Documents: parts, labels, pairs and identity."""

import dataclasses

import numpy as np
import pytest

from meliad_rec.data.documents import count_words
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.documents import token_dtype
from meliad_rec.data.vocabulary import Bytes

TEXTS = ['one two', '', 'žluť three\n four', 'x']
PAIRS = ['one two', 'ab', 'žluť three\n four']


def collect(texts, labels=None, first_length=None):
  """Documents of texts; labels and first_length are functions of (i, ids)."""
  documents = []
  for i, text in enumerate(texts):
    ids = Bytes().encode(text)
    document = Document(str(i), ids, len(ids), count_words(text))
    if labels:
      document = document._replace(labels=labels(i, ids))
    if first_length:
      document = document._replace(first_length=first_length(i, ids))
    documents.append(document)
  return Documents.collect(documents, Bytes())


def collect_labeled(texts):
  """The label of each byte is the next id, at odd positions only."""
  return collect(texts, lambda _, ids: (ids + 1) * (np.arange(len(ids)) % 2))


def last_label(i, ids):
  return np.array([0] * (len(ids) - 1) + [i + 1])


def collect_pairs(texts):
  """The first sequence is a third of the bytes; the labels are 1, 2, 3, ..."""
  return collect(texts, last_label, lambda _, ids: -(-len(ids) // 3))


def test_documents_are_kept():
  documents = collect(TEXTS)
  assert len(documents) == 4
  assert [Bytes().decode(documents[i]) for i in range(4)] == TEXTS
  assert (
    documents.lengths.tolist() == documents.bytes_.tolist() == [7, 0, 18, 1]
  )
  assert documents.words.tolist() == [2, 0, 3, 1]
  assert documents.tokens.dtype == np.uint16
  with pytest.raises(IndexError):
    documents[4]
  assert len(collect([])) == 0 and collect([]).starts.tolist() == [0]


def test_dtypes_and_words():
  assert token_dtype(2**16) == np.uint16
  assert token_dtype(2**16 + 1) == np.uint32
  assert count_words(' two\r\n wörds\t') == 2 and count_words(' ') == 0


def test_ids_outside_the_vocabulary_are_refused():
  collect_ids = lambda *ids: Documents.collect(
    [Document('a', np.array(ids, np.int64), 1, 1)], Bytes()
  )
  collect_ids()
  collect_ids(1, Bytes().size - 1)
  for wrong in 0, -1, Bytes().size, 70_000:
    with pytest.raises(ValueError, match="'a' .* 258"):
      collect_ids(1, wrong, 2)


@pytest.mark.parametrize('ids', [np.array([[5, 6]]), np.array([5.5, 6.5])])
def test_ids_and_labels_are_rows_of_integers(ids):
  with pytest.raises(ValueError, match="ids of document 'a' .* got"):
    Documents.collect([Document('a', ids, 1, 1)], Bytes())
  with pytest.raises(ValueError, match="labels of document '0' .* got"):
    collect(['ab'], lambda *_: ids)


def test_labels_outside_the_vocabulary_are_refused():
  collect(['ab'], lambda *_: np.array([0, Bytes().size - 1]))
  for wrong in -1, Bytes().size, 2**16 + 1:
    with pytest.raises(ValueError, match=f'label {wrong}, .* 258'):
      collect(['ab'], lambda *_, wrong=wrong: np.array([0, wrong]))


@pytest.mark.parametrize('tokens', [None, 1, 7, 9, 100])
def test_head_counts_what_remains_and_keeps_labels(tokens):
  head = {'count': 3, 'tokens': tokens, 'vocabulary': Bytes()}
  part, labeled = (
    collect(TEXTS).head(**head),
    collect_labeled(TEXTS).head(**head),
  )
  assert part.names == ['0', '1', '2']
  np.testing.assert_array_equal(labeled.tokens, part.tokens)
  for i in range(3):
    ids = collect(TEXTS)[i][:tokens]
    np.testing.assert_array_equal(part[i], ids)
    assert part.bytes_[i] == len(ids)
    assert part.words[i] == count_words(Bytes().decode(ids))
    inputs, labels = labeled.read(i, 0, len(ids))
    np.testing.assert_array_equal(inputs, ids)
    odd = np.arange(len(ids)) % 2 == 1
    np.testing.assert_array_equal(labels, np.where(odd, ids + 1, 0))
  assert labeled.labels.dtype == part.tokens.dtype


@pytest.mark.parametrize('tokens', [1, 4])
def test_head_cuts_each_sequence_of_a_pair(tokens):
  pairs = collect_pairs(PAIRS)
  part = pairs.head(tokens=tokens, vocabulary=Bytes())
  for i in range(3):
    u, v = np.split(pairs[i], [pairs.first_lengths[i]])
    expected = [*u[:tokens], *v[:tokens]]
    assert part[i].tolist() == expected
    assert part.first_lengths[i] == min(tokens, len(u))
    assert part.bytes_[i] == len(expected)
    # The label is on the last token, and is cut with it.
    labels = part.labels[part.starts[i] : part.starts[i + 1]]
    assert not labels[:-1].any()
    assert labels[-1] == (0 if len(v) > tokens else i + 1)


def test_head_without_cuts():
  documents, pairs = collect(TEXTS), collect_pairs(PAIRS)
  assert documents.head(count=9).identity == documents.identity
  assert documents.head(count=3).identity == collect(TEXTS[:3]).identity
  assert pairs.head(count=2).first_lengths.tolist() == [3, 1]
  assert pairs.head(tokens=12).identity == pairs.identity
  with pytest.raises(ValueError, match='count'):
    documents.head(count=0)
  with pytest.raises(ValueError, match='vocabulary'):
    documents.head(tokens=2)


def test_text_is_shifted_and_labeled_tokens_are_not():
  text, labeled = collect(TEXTS), collect_labeled(TEXTS)
  ids = text[2]
  for offset, count in (0, 5), (3, 9), (17, 1):
    inputs, targets = text.read(2, offset, count)
    assert inputs.tolist() == [0, *ids][offset : offset + count]
    assert targets.tolist() == ids[offset : offset + count].tolist()
    inputs, _ = labeled.read(2, offset, count)
    assert inputs.tolist() == targets.tolist()


def test_pairs_have_two_lengths():
  pairs = collect_pairs(PAIRS)
  assert pairs.first_lengths.tolist() == [3, 1, 6]
  assert pairs.first_lengths.dtype == np.int64
  assert pairs.sequence_lengths.tolist() == [[3, 4], [1, 1], [6, 12]]
  assert collect(PAIRS).sequence_lengths.tolist() == [[7], [2], [18]]


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'labels': np.zeros(26)}, '26 .* 27'),
    ({'first_lengths': np.array([1, 1])}, '2 first_lengths for 3'),
    ({'first_lengths': np.array([1, 0, 3])}, "'1' .* first_length 0"),
    ({'first_lengths': np.array([7, 1, 4])}, "'0' .* first_length 7"),
    ({'labels': np.ones(27)}, "'0' .* token 0 .* label 1"),
  ],
)
def test_labels_and_pairs_must_fit_the_documents(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(collect_pairs(PAIRS), **changes)


def test_all_documents_have_labels_or_none_does():
  only_first = lambda i, ids: None if i else np.arange(len(ids))
  with pytest.raises(ValueError, match='1 of 2 documents have labels'):
    collect(['ab', 'cd'], only_first)
  # As many labels as tokens in total, but not in each document.
  with pytest.raises(ValueError, match='2 of 2 documents have labels'):
    collect(['ab', 'cd'], lambda i, _: np.arange(1 + 2 * i))
  with pytest.raises(ValueError, match='1 of 2 documents are pairs'):
    collect(['ab', 'cd'], last_label, lambda i, _: None if i else 1)


def test_identity_depends_on_content_only():
  documents, labeled = collect(TEXTS), collect_labeled(TEXTS)
  pairs = collect_pairs(PAIRS)
  renamed = dataclasses.replace(documents, names=list('abcd'))
  assert renamed.identity == documents.identity
  assert labeled.identity == collect_labeled(TEXTS).identity
  assert pairs.identity == collect_pairs(PAIRS).identity
  others = [
    collect([*TEXTS[:3], 'y']),
    dataclasses.replace(documents, starts=documents.starts + [0, 0, 0, 1, 0]),
    dataclasses.replace(documents, words=documents.words + 1),
    labeled,
    dataclasses.replace(labeled, labels=labeled.labels[::-1]),
    pairs,
    dataclasses.replace(pairs, first_lengths=pairs.first_lengths[::-1]),
    dataclasses.replace(pairs, first_lengths=None),
  ]
  identities = {each.identity for each in (documents, *others)}
  assert len(identities) == 1 + len(others)
