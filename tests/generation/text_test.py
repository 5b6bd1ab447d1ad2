"""Text generated in pieces is the text of its tokens."""

import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
import pytest

from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.data.vocabulary import SentencePiece
from meliad_rec.data.vocabulary import WordList
from meliad_rec.generation.beam import BeamSearch
from meliad_rec.generation.decoder import Decoder
from meliad_rec.generation.sample import Sample
from meliad_rec.generation.sampling import Sampler
from meliad_rec.generation.text import StreamingDetokenizer
from meliad_rec.generation.text import TextGenerator
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from tests import architectures as tiny
from tests.data.vocabulary_test import EXACT
from tests.data.vocabulary_test import SENTENCES
from tests.pieces import train

TEXT = '  wörds, \u20ac and \U0001d11e, twice wörds \u20ac  \n'


def test_pieces_are_the_text_of_the_tokens_and_prompts_may_come_in_parts():
  model = Model(Bytes.size, tiny.windowed(1), tiny.D)
  params = jax.jit(lambda: initialize(model, jax.random.key(0), 1, tiny.W))()
  generator = TextGenerator(Decoder(model, params, tiny.W, chunk=5), Bytes())
  sampler = Sampler()
  state = generator.read('é').repeat(2)
  written = list(generator.write(state, 12, sampler, seed=1))
  ids = generator.decoder.generate(state, 12, sampler, seed=1)
  ids_BT = np.concatenate([part for _, part in ids], 1)
  for row in range(2):
    text = ''.join(pieces[row] for _, pieces in written)
    assert text == Bytes().decode(ids_BT[row])
  assert int(written[-1][0].count) == 14
  # Two characters, which need not be in one piece; in the first row, none.
  until = text[4:6]
  ended = list(generator.write(state, 12, sampler, seed=1, until=until))
  for row in range(2):
    text = ''.join(pieces[row] for _, pieces in written)
    head, found, _ = text.partition(until)
    assert ''.join(pieces[row] for _, pieces in ended) == head + found
  with pytest.raises(ValueError, match='until must be a UTF-8 text'):
    next(generator.write(state, 12, sampler, seed=1, until=''))
  (only,) = generator.write(generator.read(''), 0, sampler, seed=0)
  assert only[1] == ['']
  whole = generator.read('a text of more than a window')
  parts = generator.read(' of more than a window', generator.read('a text'))
  close = functools.partial(np.testing.assert_allclose, atol=2e-5)
  jax.tree.map(close, whole, parts)


def test_what_continues_a_text_gets_no_space(tmp_path):
  path = tmp_path / 'prefix.model'
  path.write_bytes(train(SENTENCES, 300, **EXACT, add_dummy_prefix=True))
  generator = TextGenerator(Decoded(), SentencePiece(path))
  generator.read('plain words, twice')
  state = generator.read('plain')
  for part in ' words', ', ', 'twice':
    state = generator.read(part, state)
  whole, *parts = generator.decoder.ids
  assert generator.vocabulary.decode(np.concatenate(parts)) == (
    generator.vocabulary.decode(whole)
  )
  assert len(generator.vocabulary.encode(',')) == 2
  with pytest.raises(ValueError, match='no search'):  # Not: it is two tokens.
    generator.search(state, 1, BeamSearch(1), until=',')


def test_a_search_ends_at_a_word_of_the_vocabulary():
  generator = TextGenerator(Decoded(), WordList(['<eos>', '<unk>', 'stop']))
  for known in 'stop', '\n', '<unk>':
    with pytest.raises(ValueError, match='no search'):
      generator.search(generator.read('stop'), 1, BeamSearch(1), known)
  for other in 'halt', 'stop stop':
    with pytest.raises(ValueError, match=f'single token .* {other!r} is not'):
      generator.search(generator.read('stop'), 1, BeamSearch(1), other)


class Decoded:
  """Stands for a decoder, and keeps the ids that it reads."""

  def __init__(self):
    self.ids = []

  def start(self, rows):
    return mock.Mock(recent_BN=[[0]] * rows, count=0)

  def read(self, state, ids_BT, on_progress):
    self.ids.append(ids_BT[0])
    return mock.Mock(recent_BN=[[0]], count=state.count + len(ids_BT[0]))

  def search(self, *_):
    raise ValueError('no search')


def test_detokenized_pieces_are_the_text(tmp_path):
  """Of bytes, and of pieces that fall back to bytes."""
  path = tmp_path / 'exact.model'
  path.write_bytes(train(SENTENCES, 300, **EXACT, add_dummy_prefix=False))
  for vocabulary in Bytes(), SentencePiece(path):
    ids = vocabulary.encode(TEXT)
    for size in (1, 2, 3):
      stream = StreamingDetokenizer(vocabulary)
      parts = [stream.add(ids[i : i + size]) for i in range(0, len(ids), size)]
      assert ''.join(parts) + stream.end() == vocabulary.decode(ids)
      assert '\ufffd' not in ''.join(parts)
    for cut in range(1, 20):
      # It goes on after recent tokens.
      before = StreamingDetokenizer(vocabulary).add(ids[:cut])
      after = StreamingDetokenizer(vocabulary, ids[:cut][-4:]).add(ids[cut:])
      assert before + after == vocabulary.decode(ids)


def test_a_broken_character_is_replaced():
  ids = Bytes().encode('\u20ac')
  stream = StreamingDetokenizer(Bytes())
  assert stream.add(ids[:2]) == ''
  assert stream.end() == '\ufffd'
  twice = np.concatenate([ids[:1], ids])
  assert StreamingDetokenizer(Bytes()).add(twice) == '\ufffd\u20ac'


@dataclasses.dataclass
class Parrot:
  """Stands for a decoder: reads the prompt, and generates given text."""

  says: str

  def start(self, rows):
    assert rows == 1

  def read(self, state, tokens_BT):
    self.prompt_BT = tokens_BT

  def generate(self, state, length, sampler, seed):
    self.asked = length, sampler, seed
    ids_BT = Bytes().encode(self.says)[None]
    yield None, ids_BT[:, :2]
    yield None, ids_BT[:, 2:]


def test_a_sample_is_the_prompt_a_bar_and_the_continuation():
  text = 'Once upon a time'
  ids = Bytes().encode(text)
  made = Documents.collect([Document('a', ids, len(ids), 1)], Bytes())
  sampler, parrot = Sampler(temperature=0.5), Parrot('hello')
  sample = Sample(prompt=4, length=5, sampler=sampler, seed=3)
  assert sample.write(parrot, made, Bytes()) == 'Once|hello'
  assert parrot.asked == (5, sampler, 3)
  np.testing.assert_array_equal(parrot.prompt_BT[0], Bytes().encode('Once'))
  # The document is shorter than the prompt.
  assert Sample(100).write(Parrot('!!'), made, Bytes()) == f'{text}|!!'


def test_a_character_that_a_sample_completes_is_shown():
  ids, sample = Bytes().encode('wö'), Sample(prompt=2)
  made = Documents.collect([Document('a', ids, len(ids), 1)], Bytes())
  parrot = Parrot('ö'.encode()[1:].decode(errors='surrogateescape') + 'rd')
  assert sample.write(parrot, made, Bytes()) == 'w|örd'


@pytest.mark.parametrize('name, value', [('prompt', 0), ('length', -1)])
def test_settings_of_a_sample_out_of_range(name, value):
  with pytest.raises(ValueError, match=f'{name} of the sample .*got {value}'):
    Sample(**{name: value})
