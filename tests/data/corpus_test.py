"""Corpora: streams cut by bytes or in a file per split, and their words."""

import gzip
import json
import zipfile

import numpy as np
import pytest

from meliad_rec.data.corpus import Corpus
from meliad_rec.data.jsonl import Jsonl
from meliad_rec.data.sources import Concatenated
from meliad_rec.data.sources import source
from meliad_rec.data.store import Store
from meliad_rec.data.store import write
from meliad_rec.data.text import Text
from meliad_rec.data.text import vocabulary_of
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.data.vocabulary import open_vocabulary
from meliad_rec.data.vocabulary import WordList

# 200 bytes; the cuts at 180 and 190 bytes fall inside characters.
WIKI = ('\u00e9a\n' * 50).encode()
PTB = {
  'train': ' a e <unk> a _ e \n a a \n',
  'valid': ' e _ \n',
  'test': ' a q \n',
}


@pytest.mark.parametrize('packed', [False, True])
def test_a_file_is_cut_at_90_and_95_percent_of_its_bytes(tmp_path, packed):
  path = tmp_path / 'enwik8'
  path.write_bytes(WIKI[1:] + b'.')
  if packed:
    with zipfile.ZipFile(tmp_path / 'enwik8.zip', 'w') as archive:
      archive.write(path, 'enwik8')
    path = tmp_path / 'enwik8.zip'
  text = Text(Corpus(str(path)), Bytes())
  assert text.splits == ['train', 'validation', 'test']
  ends = {'train': (0, 180), 'validation': (180, 190), 'test': (190, 200)}
  for split, (begin, end) in ends.items():
    documents = text.documents(split)
    assert len(documents) == 1 and documents.bytes_ == end - begin
    expected = np.frombuffer((WIKI[1:] + b'.')[begin:end], np.uint8)
    np.testing.assert_array_equal(documents[0], expected.astype(int) + 3)
  without = Text(Corpus(str(path), newlines=False), Bytes())
  assert without.documents('validation').bytes_ == 10 - 2
  with pytest.raises(ValueError, match='not UTF-8.*bytes'):
    Text(Corpus(str(path)), StandIn()).documents('validation')
  with pytest.raises(ValueError, match='not UTF-8.*bytes'):
    vocabulary_of(Corpus(str(path)), 'words')


class StandIn(Bytes):
  """A vocabulary of Unicode text alone."""

  def encode(self, text):
    return super().encode(text.encode().decode())


def test_missing_files_are_reported_with_the_command_that_gets_them(tmp_path):
  for path in 'enwik8', 'wiki.{split}.tokens':
    missing = Corpus(str(tmp_path / path), fetch='curl -O URL')
    with pytest.raises(
      ValueError, match='Run `curl -O URL`.*[oO]r set .*CORPUS'
    ):
      _ = missing.splits
  (tmp_path / 'enwik8.zip').write_bytes(b'PK')
  with pytest.raises(ValueError, match='cannot be read'):
    list(Corpus(str(tmp_path / 'enwik8.zip')).read('test'))
  with zipfile.ZipFile(
    tmp_path / 'x.zip', 'w', zipfile.ZIP_DEFLATED
  ) as archive:
    archive.writestr('x', bytes(range(256)) * 9)
  damaged = bytearray((tmp_path / 'x.zip').read_bytes())
  damaged[60:80] = b'\xff' * 20
  (tmp_path / 'x.zip').write_bytes(damaged)
  with pytest.raises(ValueError, match='x.zip cannot be read'):
    list(Corpus(str(tmp_path / 'x.zip')).read('test'))
  with zipfile.ZipFile(tmp_path / 'two.zip', 'w') as archive:
    archive.writestr('a', 'a')
    archive.writestr('b', 'b')
  with pytest.raises(ValueError, match='2 files'):
    list(Corpus(str(tmp_path / 'two.zip')).read('test'))


@pytest.mark.parametrize(
  'content, kind',
  [
    (gzip.compress(WIKI, mtime=0), 'gzip'),
    (WIKI.decode().encode('utf-16'), 'UTF-16'),
  ],
  ids=['gzip', 'UTF-16'],
)
def test_files_that_are_not_text_are_refused(tmp_path, content, kind):
  (tmp_path / 'enwik8').write_bytes(content)
  with pytest.raises(ValueError, match=f'enwik8 is not text but .*{kind}'):
    list(Corpus(str(tmp_path / 'enwik8')).read('train'))


def test_words_are_sorted_by_frequency_and_newlines_are_words(tmp_path):
  for split, text in PTB.items():
    (tmp_path / f'ptb.char.{split}.txt').write_text(text)
  corpus = source('corpus', str(tmp_path / 'ptb.char.{split}.txt'))
  vocabulary = vocabulary_of(corpus, 'words')
  # a 4, <eos> 2, e 2, <unk> 1, _ 1
  assert vocabulary.model.decode().split() == ['a', '<eos>', 'e', '<unk>', '_']
  assert vocabulary.size == 6
  text = Text(corpus, vocabulary)
  np.testing.assert_array_equal(
    text.documents('train')[0], [1, 3, 4, 1, 5, 3, 2, 1, 1, 2]
  )
  # Words that train does not have are unknown.
  np.testing.assert_array_equal(text.documents('test')[0], [1, 4, 2])
  assert text.documents('test').words == 2
  ids = text.documents('train')[0]
  assert vocabulary.decode(ids) == 'a e <unk> a _ e\na a\n'
  spelled = vocabulary.token_bytes(ids[5:9])
  assert spelled == [b'e', b'\n', b'a', b' a']
  # A store has a copy.
  streams = {split: text.stream(split) for split in text.splits}
  write(tmp_path / 'store', streams, vocabulary, 'PTB')
  store = Store(tmp_path / 'store')
  assert store.vocabulary.identity == vocabulary.identity
  assert store.documents('validation')[0].tolist() == [3, 5, 2]
  copy = open_vocabulary(tmp_path / 'store' / 'vocabulary.txt')
  assert copy.identity == vocabulary.identity


@pytest.mark.parametrize('words', [['a', 'b'], ['<eos>', 'a', 'a'], ['a b']])
def test_a_list_of_words_must_have_each_once_and_the_end_of_a_line(words):
  with pytest.raises(ValueError, match='list of words'):
    WordList(words)


def test_a_word_that_is_not_listed_needs_unk():
  with pytest.raises(ValueError, match="neither the word 'b' nor <unk>"):
    WordList(['<eos>', 'a']).encode('a b')
  assert WordList(['<eos>']).encode('').dtype == np.int32


def test_short_documents_are_concatenated_to_long_ones(tmp_path):
  texts = ['one', 'two\n', 'three', 'f' * 30, 'five']
  lines = [json.dumps({'body': text, 'author': 'x'}) for text in texts]
  (tmp_path / 'train.jsonl').write_text('\n'.join(lines))
  short = Jsonl(str(tmp_path), 'body')
  joined = source('jsonl', str(tmp_path), field='body', concatenate=12)
  assert joined == Concatenated(short, 12)
  assert joined.splits == ('train',)
  assert list(joined.read('train')) == [
    ('train.jsonl:1', 'one\n\ntwo\n\n\nthree\n\n'),
    ('train.jsonl:4', 'f' * 30 + '\n\n'),
    ('train.jsonl:5', 'five\n\n'),
  ]
  for wrong in ({'size': 0}, {}):
    with pytest.raises(ValueError, match='--concatenate'):
      if wrong:
        Concatenated(short, **wrong)
      source('my_task', concatenate=5)
