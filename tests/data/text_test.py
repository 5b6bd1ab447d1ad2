"""Text tokenised in memory: the same documents as our own vocabularies give."""

import numpy as np
import pytest

from meliad_rec.data import store
from meliad_rec.data.documents import count_words
from meliad_rec.data.folder import Folder
from meliad_rec.data.jsonl import Jsonl
from meliad_rec.data.sources import Registered
from meliad_rec.data.text import Text
from meliad_rec.data.text import texts
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.data.vocabulary import SentencePiece
from tests.pieces import IDS
from tests.pieces import train

seqio = pytest.importorskip('seqio')

DOCUMENTS = ['two words\r\n\n\tthird', '', '  naïve 日本 \U0001f600\0 end ']


@pytest.fixture(scope='module')
def pieces(tmp_path_factory):
  path = tmp_path_factory.mktemp('pieces') / 'any.model'
  sentences = ['two words third', ' naïve end'] * 9
  model = train(sentences, 290, normalization_rule_name='identity', **IDS)
  path.write_bytes(model)
  return SentencePiece(path)


@pytest.fixture
def folder(tmp_path):
  (tmp_path / 'train').mkdir()
  for i, text in enumerate(DOCUMENTS):
    (tmp_path / 'train' / f'{i}.txt').write_bytes(text.encode())
  return Folder(str(tmp_path))


@pytest.mark.parametrize('name', ['bytes', 'pieces'])
def test_ids_are_those_of_our_own_vocabularies(folder, pieces, name, caplog):
  caplog.set_level('INFO')
  vocabulary = Bytes() if name == 'bytes' else pieces
  documents = Text(folder, vocabulary).documents('train')
  assert documents.names == [f'train/{i}.txt' for i in range(3)]
  for i, text in enumerate(DOCUMENTS):
    np.testing.assert_array_equal(documents[i], vocabulary.encode(text))
    assert documents.bytes_[i] == len(text.encode())
    assert documents.words[i] == count_words(text)
  assert 'python -m meliad_rec tokenize' in caplog.text
  assert 'Tokenised 3 documents' in caplog.text


def test_a_store_holds_the_same_documents(folder, pieces, tmp_path):
  text = Text(folder, pieces)
  splits = {split: text.stream(split) for split in text.splits}
  written = store.write(tmp_path / 'store', splits, pieces, 'a test')
  identity = text.documents('train').identity
  assert written.documents('train').identity == identity


def test_a_mixture_counts_bytes_and_words(folder):
  from meliad_rec.data import seqio_tasks

  seqio.MixtureRegistry.remove('one_folder')
  seqio.MixtureRegistry.add(
    'one_folder', [seqio_tasks.register(folder, Bytes())], default_rate=1
  )
  mixed = Text(Registered('one_folder'), Bytes()).documents('train')
  assert mixed.identity == Text(folder, Bytes()).documents('train').identity
  assert mixed.names == [f'train/{i}.txt' for i in range(3)]


def test_another_split_is_refused_by_name(folder):
  with pytest.raises(ValueError, match="no split 'test'; it has train"):
    next(Text(folder, Bytes()).stream('test'))
  with pytest.raises(ValueError, match="no split 'test'; it has train"):
    next(texts(folder, 'test'))


def test_what_a_reader_says_comes_back_as_one_sentence(tmp_path):
  (tmp_path / 'train.jsonl').write_text('{"text": "good"}\n{"other": 1}\n')
  text = Text(Jsonl(str(tmp_path)), Bytes())
  with pytest.raises(ValueError, match='train.jsonl:2 is not') as caught:
    list(text.stream('train'))
  assert '\n' not in str(caught.value)


def test_texts_come_with_and_without_seqio(folder):
  from meliad_rec.data import seqio_tasks

  assert list(texts(folder, 'train')) == DOCUMENTS
  registered = Registered(seqio_tasks.register(folder, Bytes()))
  assert list(texts(registered, 'train')) == DOCUMENTS
