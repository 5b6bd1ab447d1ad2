"""Tokenizers of Hugging Face: token bytes are the text, in every decoder."""

import json
import sys

import numpy as np
import pytest

from meliad_rec.data import store
from meliad_rec.data.store import Store
from meliad_rec.data.text import document
from meliad_rec.data.vocabulary import open_vocabulary
from meliad_rec.generation.text import encode_continuation
from meliad_rec.generation.text import StreamingDetokenizer
from meliad_rec.runs import folder
from tests import tiny_run

tokenizers = pytest.importorskip('tokenizers')
decoders, models = tokenizers.decoders, tokenizers.models
normalizers, trainers = tokenizers.normalizers, tokenizers.trainers
pre_tokenizers = tokenizers.pre_tokenizers

TEXTS = [
  '',
  'plain words, twice: plain words',
  'three   spaces, then\n\n\tnew lines\r\n',
  'naïve café 日本語 \U0001f600 e\u0301',
  '\0\x01\u2028\ufeff',
  '<s>not a token</s>',
  'an added  word',
]


def train(normalizer, pre_tokenizer, decoder, special, **settings):
  """A tokenizer of a few merges, which cuts and pads what it is given."""
  made = tokenizers.Tokenizer(models.BPE(dropout=0.5, **settings))
  if normalizer:
    made.normalizer = normalizer
  made.pre_tokenizer, made.decoder = pre_tokenizer, decoder
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(
    vocab_size=400,
    special_tokens=special,
    initial_alphabet=[] if special[1:] else alphabet,
    show_progress=False,
  )
  made.train_from_iterator(['plain words, twice', 'naïve café'] * 9, trainer)
  made.add_tokens(['added  word'])
  made.enable_truncation(5)
  made.enable_padding(length=90)
  return json.loads(made.to_str())


def byte_level(**settings):
  cut = pre_tokenizers.ByteLevel(**settings)
  return train(None, cut, decoders.ByteLevel(), ['<s>'])


def sentencepiece(normalizer, decoder, scheme='never'):
  """As Llama 2: characters that are not in the vocabulary become bytes."""
  cut = pre_tokenizers.Metaspace(prepend_scheme=scheme)
  special = ['<unk>', '<s>', '</s>']
  made = train(
    normalizer, cut, decoder, special, byte_fallback=True, unk_token='<unk>'
  )
  vocabulary = made['model']['vocab']
  for byte in range(256):
    vocabulary[f'<0x{byte:02X}>'] = 1000 + byte
  return made


def saved(tmp_path, made):
  path = tmp_path / 'tokenizer.json'
  path.write_text(json.dumps(made))
  return open_vocabulary(path)


KINDS = {
  'byte level': lambda: byte_level(add_prefix_space=False),
  'byte level with a space': lambda: byte_level(add_prefix_space=True),
  'llama': lambda: sentencepiece(
    normalizers.Prepend('\u2581'),
    decoders.Sequence(
      [
        decoders.Replace('\u2581', ' '),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(' ', 1, 0),
      ]
    ),
  ),
  'metaspace': lambda: sentencepiece(
    None,
    decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    'always',
  ),
}


@pytest.fixture(params=KINDS)
def vocabulary(request, tmp_path):
  return saved(tmp_path, KINDS[request.param]())


def test_decode_undoes_encode(vocabulary):
  for text in TEXTS:
    ids = vocabulary.encode(text)
    assert ids.dtype == np.int32
    assert ((ids > 0) & (ids < vocabulary.size)).all()
    # Words that are added keep the space that the tokenizer adds before them.
    if 'added' not in text:
      assert vocabulary.decode(ids) == text
      assert b''.join(vocabulary.token_bytes(ids)) == text.encode()
      np.testing.assert_array_equal(ids, vocabulary.encode(text))
      for end in range(len(ids) + 1):
        spelled = b''.join(vocabulary.token_bytes(ids[:end]))
        assert text.encode().startswith(spelled)
  assert vocabulary.decode([0]) == ''


def test_added_words_are_spelled_and_special_ones_are_not(tmp_path):
  vocabulary = saved(tmp_path, KINDS['byte level']())
  text = 'an added  word'
  assert vocabulary.decode(vocabulary.encode(text)) == text
  assert len(vocabulary.encode(text)) < len(vocabulary.encode('an other  word'))
  special = 1 + json.loads(vocabulary.model)['model']['vocab']['<s>']
  assert special not in vocabulary.encode('<s>')
  assert vocabulary.token_bytes([special]) == [b'']


def test_text_that_a_tokenizer_cannot_spell_is_refused(tmp_path):
  vocabulary = saved(tmp_path, KINDS['byte level']())
  with pytest.raises(ValueError, match='--vocabulary=bytes'):
    document('cut', 'half \udcc3', vocabulary)
  made = byte_level(add_prefix_space=False)
  made['model'] |= {'vocab': {'a': 0, 'Ã': 1}, 'merges': []}
  made['added_tokens'] = []
  vocabulary = saved(tmp_path, made)
  assert vocabulary.encode('aa').tolist() == [1, 1]
  with pytest.raises(ValueError, match='tokenizer.json has .* the byte 169 '):
    vocabulary.encode('aé')


def test_text_is_written_piece_by_piece(vocabulary):
  text = TEXTS[3]
  writer = StreamingDetokenizer(vocabulary)
  pieces = [writer.add([i]) for i in vocabulary.encode(text)]
  assert ''.join([*pieces, writer.end()]) == text


def test_a_continuation_begins_with_no_space_of_its_own(vocabulary):
  for before, text in ('plain', ' words, twice'), ('plain wo', 'rds'), ('', ''):
    ids = [vocabulary.encode(before), encode_continuation(vocabulary, text)]
    assert vocabulary.decode(np.concatenate(ids)) == before + text
  assert len(encode_continuation(vocabulary, ',')) == 1


def test_stores_and_runs_keep_the_tokenizer(tmp_path):
  vocabulary = saved(tmp_path, KINDS['llama']())
  splits = {
    split: [document(split, TEXTS[1], vocabulary)]
    for split in ('train', 'validation')
  }
  store.write(tmp_path / 'store', splits, vocabulary, 'a test')
  (tmp_path / 'tokenizer.json').unlink()
  data = Store(tmp_path / 'store')
  assert data.vocabulary.identity == vocabulary.identity
  found = data.vocabulary.decode(data.documents('train')[0])
  assert found == TEXTS[1]
  store.verify(tmp_path / 'store')
  experiment = tiny_run.experiment(data, tiny_run.program())
  folder.write(tmp_path / 'run', experiment, '')
  assert folder.read(tmp_path / 'run')[2].identity == vocabulary.identity
  files = [path.name for path in folder.files(tmp_path / 'run')]
  assert files == ['config.gin', 'run.json', 'tokenizer.json']  # To export.
  (tmp_path / 'run' / 'tokenizer.json').write_bytes(vocabulary.model + b' ')
  with pytest.raises(ValueError, match='trained with the vocabulary tokenizer'):
    folder.read(tmp_path / 'run')


@pytest.mark.parametrize(
  ('content', 'told'),
  [
    ('{"version": "1.0"}', 'not a tokenizer'),
    ('[' * 10**5, 'not a tokenizer'),
    (None, r'cannot be read \(No such file'),
    ('WordPiece', r'decoder WordPiece, .* ByteLevel, Metaspace'),
  ],
)
def test_other_files_are_refused(tmp_path, content, told):
  path = tmp_path / 'tokenizer.json'
  if content == 'WordPiece':
    made = tokenizers.Tokenizer(models.WordPiece({'a': 0}, unk_token='a'))
    made.decoder = decoders.WordPiece()
    content = made.to_str()
  if content:
    path.write_text(content)
  with pytest.raises(ValueError, match=f'tokenizer.json .*{told}'):
    open_vocabulary(path)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'tokenizers', None)
  with pytest.raises(ValueError, match=r'Install meliad_rec\[hf\]'):
    open_vocabulary(tmp_path / 'tokenizer.json')
