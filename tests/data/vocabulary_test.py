"""Laws of vocabularies: token bytes are the text, and padding never occurs."""

import numpy as np
import pytest
import sentencepiece

from meliad_rec.data.vocabulary import Bytes
from meliad_rec.data.vocabulary import open_vocabulary
from meliad_rec.data.vocabulary import SentencePiece
from meliad_rec.data.vocabulary import Words
from tests import pieces

TEXTS = [
  '',
  ' ',
  'plain words, twice: plain words',
  '   three spaces, then\n\n\tnew lines\r\n',
  'naïve café 日本語 \U0001f600 e\u0301',
  '\0\x01\u2028\ufeff',
]


SENTENCES = ['plain words, twice', ' naïve café'] * 20
EXACT = {
  'normalization_rule_name': 'identity',
  'remove_extra_whitespaces': False,
  'allow_whitespace_only_pieces': True,
  **pieces.IDS,
}


@pytest.fixture(scope='module')
def models(tmp_path_factory):
  folder = tmp_path_factory.mktemp('models')
  settings = {
    'exact': {**EXACT, 'add_dummy_prefix': False},
    'prefix': {**EXACT, 'add_dummy_prefix': True},
    'lossy': pieces.IDS,
  }
  for name, chosen in settings.items():
    model = pieces.train(SENTENCES, 300, **chosen)
    (folder / name).write_bytes(model)
  return folder


@pytest.fixture(params=['bytes', 'exact', 'prefix'])
def lossless(request, models):
  name = request.param
  return open_vocabulary(name if name == 'bytes' else models / name)


def test_decode_undoes_encode(lossless):
  for text in TEXTS:
    ids = lossless.encode(text)
    assert ids.dtype == np.int32
    assert lossless.decode(ids) == text
    assert b''.join(lossless.token_bytes(ids)) == text.encode()
    assert ((ids > 0) & (ids < lossless.size)).all()
  # Special ids have no text.
  ids = lossless.encode('plain')
  assert lossless.decode([0, *ids, 1]) == 'plain'
  assert lossless.token_bytes([0, 1]) == [b'', b'']


def test_bytes_of_a_lossy_model_are_what_sentencepiece_decodes(models):
  vocabulary = SentencePiece(models / 'lossy')
  plain = sentencepiece.SentencePieceProcessor(model_file=vocabulary.path)
  for text in ['  many   spaces ', *TEXTS[:3], TEXTS[4]]:
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == plain.decode(ids.tolist())


def test_the_first_ids_spell_the_beginning_of_the_text(models):
  vocabulary = SentencePiece(models / 'prefix')
  text = ' plain café \U0001f600'
  ids = vocabulary.encode(text)
  for end in range(len(ids) + 1):
    spelled = b''.join(vocabulary.token_bytes(ids[:end]))
    assert text.encode().startswith(spelled)


def test_byte_ids_are_three_more_than_the_bytes():
  np.testing.assert_array_equal(Bytes().encode('\0é'), [3, 0xC3 + 3, 0xA9 + 3])
  # Invalid UTF-8 is replaced.
  assert Bytes().decode(Bytes().encode('é')[:1]) == '\ufffd'


def test_the_identity_depends_on_the_content_of_the_file(models, tmp_path):
  (tmp_path / 'copy').write_bytes((models / 'exact').read_bytes())
  exact = SentencePiece(models / 'exact').identity
  assert SentencePiece(tmp_path / 'copy').identity == exact
  assert SentencePiece(models / 'prefix').identity != exact


def test_ids_of_a_model_that_gives_text_id_0_are_one_higher(tmp_path):
  """As those of the vocabulary of PG-19 in google-research/meliad."""
  model = pieces.train(SENTENCES, 30, byte_fallback=False, bos_id=-1, eos_id=-1)
  (tmp_path / 'zero').write_bytes(model)
  vocabulary = SentencePiece(tmp_path / 'zero')
  plain = sentencepiece.SentencePieceProcessor(model_proto=model)
  for text in ['Q, twice', 'plain, Q words', '  words']:
    ids = vocabulary.encode(text)
    assert (ids - 1).tolist() == plain.encode(text)
    decoded = plain.decode((ids - 1).tolist())
    assert vocabulary.decode(ids) == decoded
    assert vocabulary.decode([0, *ids, 0]) == decoded
  assert 0 in plain.encode('Q')
  assert vocabulary.size == plain.get_piece_size() + 1
  assert vocabulary.adds_space
  # seqio gives the ids of the model itself.
  assert not vocabulary.identity.startswith('sentencepiece:')


def test_other_files_are_refused(tmp_path):
  with pytest.raises(ValueError, match='absent.model'):
    open_vocabulary(tmp_path / 'absent.model')
  (tmp_path / 'text.model').write_text('no model')
  with pytest.raises(ValueError, match='text.model'):
    open_vocabulary(tmp_path / 'text.model')
  words = tmp_path / 'words.txt'
  words.write_bytes(b'\xef\xbb\xbfcaf\xc3\xa9\n<eos>\n<unk>\n')
  assert open_vocabulary(words).encode('caf\xe9').tolist() == [1]
  words.write_bytes(b'caf\xe9\n<eos>\n<unk>\n')
  with pytest.raises(ValueError, match=r'words.txt .* not UTF-8 \(byte 3\)'):
    open_vocabulary(words)


WORDS = Words(['if', 'x', '=', '10', 'é'])


def test_word_ids_start_at_1_in_the_given_order():
  ids = WORDS.encode(' x = 10\n= é ')
  assert ids.tolist() == [2, 3, 4, 3, 5]
  assert ids.dtype == np.int32
  assert WORDS.size == 6
  assert WORDS.encode('').tolist() == []


def test_words_are_decoded_exactly():
  for text in ('x = 10 é if', 'if', ''):
    ids = WORDS.encode(text)
    assert WORDS.decode(ids) == text
    spelled = WORDS.token_bytes(ids)
    assert len(spelled) == len(ids)
    assert b''.join(spelled) == text.encode()
  # Padding has no text.
  assert WORDS.decode(np.array([0, 1, 0, 2])) == 'if x'
  assert WORDS.token_bytes(np.array([0, 0])) == [b'', b'']


def test_words_are_restored_from_their_identity():
  again = Words.from_identity(WORDS.identity)
  assert again.words == WORDS.words
  assert again.identity == WORDS.identity
  assert Words(['x', 'if', '=', '10', 'é']).identity != WORDS.identity


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: Words(['a', 'b c']), 'b c'),
    (lambda: Words(['a', '']), 'empty'),
    (lambda: Words(['a', 'b', 'a']), 'twice'),
    (lambda: Words.from_identity('bytes'), "'bytes'"),
    (lambda: WORDS.encode('x = 7'), "'7'.* if x = 10 é"),
  ],
)
def test_invalid_words_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()
