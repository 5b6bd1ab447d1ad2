"""Documents: what a part of them holds, and when two are the same."""

import dataclasses

import numpy as np
import pytest

from meliad_rec.data.documents import count_words
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.vocabulary import Bytes

TEXTS = ['one two', '', 'žluť three\n four', 'x']


def collect(texts):
  return Documents.collect(
    (
      Document(
        str(i), Bytes().encode(text), len(text.encode()), count_words(text)
      )
      for i, text in enumerate(texts)
    ),
    Bytes(),
  )


def collect_labelled(texts):
  """Each byte is labelled with the id after its own, at odd places only."""

  def document(i, text):
    ids = Bytes().encode(text)
    labels = (ids + 1) * (np.arange(len(ids)) % 2)
    return Document(f'{i}', ids, len(ids), count_words(text), labels)

  return Documents.collect(map(document, range(len(texts)), texts), Bytes())


def collect_pairs(texts):
  """The first sequence is a third of the bytes; labels are 1, 2, 3, ..."""

  def document(i, text):
    ids = Bytes().encode(text)
    labels = np.zeros(len(ids), int)
    labels[-1] = i + 1
    words, middle = count_words(text), -(-len(ids) // 3)
    return Document(f'{i}', ids, len(ids), words, labels, middle)

  return Documents.collect(map(document, range(len(texts)), texts), Bytes())


PAIRS = ['one two', 'ab', 'žluť three\n four']


def test_documents_come_back_as_they_went_in():
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


def test_no_documents_are_an_empty_split():
  assert len(collect([])) == 0 and collect([]).starts.tolist() == [0]


def test_ids_of_another_vocabulary_are_refused():
  with pytest.raises(ValueError, match="'x' holds an id outside 1 to"):
    Documents.collect([Document('x', np.array([300]), 1, 1)], Bytes())


@pytest.mark.parametrize('tokens', [1, 2, 7, 9, 100])
def test_a_part_counts_what_is_left(tokens):
  part = collect(TEXTS).head(count=3, tokens=tokens, vocabulary=Bytes())
  assert part.names == ['0', '1', '2']
  for i in range(3):
    ids = collect(TEXTS)[i][:tokens]
    np.testing.assert_array_equal(part[i], ids)
    assert part.bytes_[i] == len(ids)
    assert part.words[i] == count_words(Bytes().decode(ids))


@pytest.mark.parametrize('tokens', [None, 2, 7, 100])
def test_labels_stay_with_their_tokens(tokens):
  whole = collect_labelled(TEXTS)
  part = whole.head(count=3, tokens=tokens, vocabulary=Bytes())
  expected = collect(TEXTS).head(count=3, tokens=tokens, vocabulary=Bytes())
  np.testing.assert_array_equal(part.tokens, expected.tokens)
  np.testing.assert_array_equal(part.words, expected.words)
  for i in range(3):
    inputs, labels = part.read(i, 0, int(part.lengths[i]))
    np.testing.assert_array_equal(inputs, expected[i])
    odd = np.arange(len(inputs)) % 2 == 1
    np.testing.assert_array_equal(labels, np.where(odd, inputs + 1, 0))
  assert part.labels.dtype == part.tokens.dtype


def test_middles_stay_with_their_documents():
  pairs = collect_pairs(PAIRS)
  assert pairs.middles.tolist() == [3, 1, 6]
  assert pairs.middles.dtype == np.int64
  assert pairs.labels[pairs.labels > 0].tolist() == [1, 2, 3]
  assert pairs.head(count=2).middles.tolist() == [3, 1]
  assert pairs.head(tokens=12, vocabulary=Bytes()).middles.tolist() == [3, 1, 6]


@pytest.mark.parametrize('tokens', [1, 2, 4, 7])
def test_of_a_pair_each_sequence_is_cut(tokens):
  pairs = collect_pairs(PAIRS)
  part = pairs.head(tokens=tokens, vocabulary=Bytes())
  for i in range(3):
    u, v = np.split(pairs[i], [pairs.middles[i]])
    kept = [*u[:tokens], *v[:tokens]]
    assert part[i].tolist() == kept
    assert part.middles[i] == min(tokens, len(u))
    assert part.bytes_[i] == len(kept)
    assert part.words[i] == count_words(Bytes().decode(np.array(kept)))
    # The label lies at the end, and goes with it.
    labels = part.labels[part.starts[i] : part.starts[i + 1]]
    assert not labels[:-1].any()
    assert labels[-1] == (0 if len(v) > tokens else i + 1)


def test_text_is_read_shifted_and_labels_are_not():
  text, labelled = collect(TEXTS), collect_labelled(TEXTS)
  ids = text[2]
  for at, count in (0, 5), (3, 9), (17, 1):
    inputs, targets = text.read(2, at, count)
    before = [0, *ids][at : at + count]
    assert inputs.tolist() == before
    assert targets.tolist() == ids[at : at + count].tolist()
    inputs, _ = labelled.read(2, at, count)
    assert inputs.tolist() == targets.tolist()


def test_labels_are_for_all_tokens_or_for_none():
  made = collect_labelled(TEXTS)
  with pytest.raises(ValueError, match='labels for 26 tokens; give each token'):
    dataclasses.replace(made, labels=made.labels[:-1])
  pair = [Document('a', np.array([3, 4]), 2, 1, np.array([0, 5]))]
  pair.append(pair[0]._replace(labels=None))
  told = '^1 of 2 documents have labels, 2 for 4 tokens'
  with pytest.raises(ValueError, match=told):
    Documents.collect(pair, Bytes())
  # As many in all, and not one each.
  pair = [pair[0]._replace(labels=np.arange(n)) for n in (1, 3)]
  with pytest.raises(ValueError, match='^2 of 2 documents have labels'):
    Documents.collect(pair, Bytes())


def test_the_whole_is_a_part_of_itself():
  documents = collect(TEXTS)
  assert documents.head().identity == documents.identity
  assert documents.head(count=9).identity == documents.identity
  assert documents.head(count=3).identity == collect(TEXTS[:3]).identity


def test_parts_that_make_no_sense_are_refused():
  with pytest.raises(ValueError, match='count = 0'):
    collect(TEXTS).head(count=0)
  with pytest.raises(ValueError, match='give vocabulary'):
    collect(TEXTS).head(tokens=2)


def test_identity_follows_content_alone():
  documents = collect(TEXTS)
  renamed = dataclasses.replace(documents, names=list('abcd'))
  assert renamed.identity == documents.identity
  assert collect(['one two', '', 'žluť three\n four', 'y']).identity != (
    documents.identity
  )
  border = documents.starts + [0, 0, 0, 1, 0]
  moved = dataclasses.replace(documents, starts=border)
  assert moved.identity != documents.identity
  labelled = collect_labelled(TEXTS)
  assert labelled.identity != documents.identity
  assert labelled.identity == collect_labelled(TEXTS).identity
  others = dataclasses.replace(labelled, labels=labelled.labels[::-1])
  assert others.identity != labelled.identity
  pairs = collect_pairs(PAIRS)
  moved = dataclasses.replace(pairs, middles=pairs.middles[::-1])
  single = dataclasses.replace(pairs, middles=None)
  assert len({one.identity for one in (pairs, moved, single)}) == 3
  assert pairs.identity == collect_pairs(PAIRS).identity
  longer = dataclasses.replace(documents, words=documents.words + 1)
  assert longer.identity != documents.identity
