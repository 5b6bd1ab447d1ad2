"""Commands that make a lossless vocabulary of text, and a store of tokens."""

import argparse
from pathlib import Path

from absl import flags
from absl.testing import flagsaver
import pytest

from meliad_rec.commands import tokenize
from meliad_rec.commands import train_vocab
from meliad_rec.commands.train_vocab import sentences
from meliad_rec.commands.train_vocab import train
from meliad_rec.data.store import Store
from meliad_rec.data.vocabulary import SentencePiece
from tests import command
from tests import tiny_run


def test_a_folder_becomes_a_store(tmp_path, capsys):
  for split, text in (('train', 'two wörds\r\n'), ('test', 'end')):
    (tmp_path / split).mkdir()
    (tmp_path / split / 'a.txt').write_bytes(text.encode())
  args = '--source=folder', f'--path={tmp_path}', f'--out={tmp_path}/store'
  assert command.run(tokenize, *args, '--vocabulary=bytes') == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].startswith('train: 1 document, 12 tokens, 12 bytes, 2 words')
  assert lines[1].startswith('test: 1 document, 3 tokens, 3 bytes, 1 word,')
  found = Store(tmp_path / 'store')
  assert found.vocabulary.decode(found.documents('train')[0]) == 'two wörds\r\n'
  assert '--force' in command.mistake(tokenize, *args)


@pytest.mark.parametrize(
  ('arguments', 'told'),
  [
    ([], '--source'),
    (['--source=folder'], '--path'),
    (['--source=folder', '--path=/no/such'], '/no/such. Set --path to a'),
    (
      ['--source=folder', f'--path={__file__}'],
      '_test.py is a file. Read it with --source=corpus',
    ),
    (['--source=code', '--vocabulary=x.model'], 'x.model'),
    (['--source=code', 'folder'], "'folder'"),
    (
      [
        *('--source=pairs', '--path=a.{split}', '--target=b.{split}'),
        *('--vocabulary=bytes', '--concatenate=9'),
      ],
      'Pairs cannot be concatenated',
    ),
    (['--source=code', '--out='], '--out is missing'),
    (['--verify=a', '--splits=b', '--force'], '--splits, --out and --force'),
  ],
)
def test_mistakes_are_told_before_anything_is_written(
  tmp_path, arguments, told
):
  out = f'--out={tmp_path}/store'
  assert told in command.mistake(tokenize, out, *arguments)
  assert not list(tmp_path.iterdir())


def test_verify_excludes_all_other_flags():
  with flagsaver.flagsaver():
    before = {*flags.FLAGS}
    tokenize.define_flags()
    defined = {*flags.FLAGS} - before
  assert {*tokenize._WRITE_FLAGS} == defined - {'verify'}


def test_a_store_is_verified(tmp_path, capsys):
  store = tmp_path / 'store'
  tiny_run.write_store(store)
  assert command.run(tokenize, f'--verify={store}') == 0
  assert capsys.readouterr().out == f'{store} is unchanged\n'
  path = store / 'test.tokens'
  path.write_bytes(path.read_bytes()[::-1])
  assert 'test.tokens' in command.mistake(tokenize, f'--verify={store}')


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


def test_any_text_is_spelled_and_indentation_is_a_piece(tmp_path):
  path = tmp_path / 'small.model'
  path.write_bytes(train(sentences(lambda: iter([CODE]), 10**6), 600))
  vocabulary = SentencePiece(path)
  for text in PROSE, CODE, *DIFFICULT:
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert b''.join(vocabulary.token_bytes(ids)) == text.encode()
    assert (ids > 0).all()
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


def test_a_character_cut_in_two_is_left_out():
  cut = 'ab\u0439'.encode()[:-1].decode('utf-8', 'surrogateescape')
  assert ''.join(sentences(lambda: iter([cut]), 100)) == 'ab'


def test_errors_are_sentences():
  def read():
    yield 'text'
    raise ValueError('line 7 is wrong.')

  with pytest.raises(ValueError, match='^line 7 is wrong.$'):
    train(read(), 400)
  with pytest.raises(ValueError, match='at most 2.. ids, got --size=9999'):
    train(iter(['few words']), 9999)
  with pytest.raises(ValueError, match='empty'):
    train(iter([]), 400)


def test_the_command_writes_a_model(tmp_path, capsys):
  (tmp_path / 'train').mkdir()
  (tmp_path / 'train' / 'a.txt').write_text(PROSE)
  out = tmp_path / 'a.model'
  given = train_vocab, '--source=folder', f'--path={tmp_path}', f'--out={out}'
  assert command.run(*given, '--size=280') == 0
  assert '280 ids' in capsys.readouterr().out
  assert '--force' in command.mistake(*given, '--size=290')
  assert SentencePiece(out).size == 280
  told = command.mistake(*given, '--size=290', '--split=dev', '--force')
  assert "'dev'. Choose one of train" in told


def test_an_unwritable_path_is_reported_before_reading(tmp_path):
  (tmp_path / 'a.model').mkdir()
  reads = '--size=280', '--source=folder', '--path=/no/such'
  for out in tmp_path / 'a.model', 'gs://b/a.model', tmp_path / 'a.txt':
    told = command.mistake(train_vocab, *reads, f'--out={out}')
    assert str(out) in told
