"""The train_vocab command: vocabularies are lossless for any text."""

import argparse
from pathlib import Path
import subprocess
import sys

import pytest

from meliad_rec.commands.train_vocab import sentences
from meliad_rec.commands.train_vocab import train
from meliad_rec.data.vocabulary import SentencePiece

PROSE = 'It was the best of times,\n\n   it was the worst of times.\n' * 40
CODE = Path(argparse.__file__).read_text()
DIFFICULT = [
  '',
  ' ',
  '\n\n\n   \n',
  '  two  three   \t\ttabs\r\nreturn\r',
  'naïve e\u0301 日本語 \U0001f600 \u200b\ufeff\u2028',
  '\0 \x7f <s> </s> <unk> <0x41>',
  'a' * 5000,
]


@pytest.fixture(scope='module')
def vocabulary(tmp_path_factory):
  path = tmp_path_factory.mktemp('vocabulary') / 'small.model'
  path.write_bytes(train(sentences(lambda: iter([CODE]), 10**6), 600))
  return SentencePiece(path)


@pytest.mark.parametrize('text', [PROSE, CODE, *DIFFICULT])
def test_decode_undoes_encode(vocabulary, text):
  ids = vocabulary.encode(text)
  assert vocabulary.decode(ids) == text
  assert b''.join(vocabulary.token_bytes(ids)) == text.encode()
  assert (ids > 0).all()


def test_newlines_and_indentation_are_pieces(vocabulary):
  assert vocabulary.size == 600
  assert len(vocabulary.encode('\n')) == 1
  assert len(vocabulary.encode('\n        ')) <= 2
  assert len(vocabulary.encode(CODE)) < len(CODE) / 2.5


def test_sentences_are_short_pieces_of_the_text_in_order():
  texts = [PROSE * 9, '', 'x' * 5000, ' \n', 'a\0b']
  pieces = list(sentences(lambda: iter(texts), 10**9))
  assert ''.join(pieces) == ''.join(texts).replace('\0', ' ')
  assert max(map(len, pieces)) <= 2048
  assert sum(piece.startswith(('\n', ' ', 'It')) for piece in pieces) > 8


def test_much_text_is_sampled_from_every_document():
  texts = [letter * 2048 * 12 for letter in 'abcd']
  pieces = list(sentences(lambda: iter(texts), 2048 * 12))
  assert [piece[0] for piece in pieces] == list('aaabbbcccddd')


def test_too_little_text_is_reported():
  with pytest.raises(ValueError, match='9999 .*--size'):
    train(iter(['few words']), 9999)
  with pytest.raises(ValueError, match='empty'):
    train(iter([]), 400)


def test_errors_of_reading_are_not_wrapped():
  def read():
    yield 'text'
    raise ValueError('line 7 is wrong.')

  with pytest.raises(ValueError, match='^line 7 is wrong.$'):
    train(read(), 400)


def test_the_command_writes_a_model(tmp_path):
  (tmp_path / 'train').mkdir()
  (tmp_path / 'train' / 'a.txt').write_text(PROSE)
  command = [sys.executable, '-m', 'meliad_rec', 'train_vocab']
  args = ['--source=folder', f'--path={tmp_path}', f'--out={tmp_path}/a.model']
  done = subprocess.run(
    [*command, *args, '--size=280'], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert '280 ids' in done.stdout
  assert SentencePiece(tmp_path / 'a.model').size == 280
  again = subprocess.run(
    [*command, *args, '--size=290'], capture_output=True, text=True
  )
  assert again.returncode == 2
  assert 'a.model exists' in again.stderr and '--force' in again.stderr
  assert SentencePiece(tmp_path / 'a.model').size == 280
  failed = subprocess.run(
    [*command, *args, '--size=280', '--split=dev', '--force'],
    capture_output=True,
    text=True,
  )
  assert failed.returncode == 2
  assert "'dev'; it has train" in failed.stderr
  assert 'Traceback' not in failed.stderr


def test_an_unwritable_path_is_reported_before_reading(tmp_path):
  (tmp_path / 'a.model').mkdir()
  command = [sys.executable, '-m', 'meliad_rec', 'train_vocab', '--size=280']
  for out in tmp_path / 'a.model', 'gs://b/a.model':
    done = subprocess.run(
      [*command, '--source=folder', '--path=/no/such', f'--out={out}'],
      capture_output=True,
      text=True,
      cwd=tmp_path,
    )
    assert done.returncode == 2
    assert str(out) in done.stderr
    assert len(done.stderr.splitlines()) == 1
