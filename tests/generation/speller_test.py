"""Pieces of text, however they are cut, are the text."""

import numpy as np
import pytest

from meliad_rec.data.vocabulary import Bytes
from meliad_rec.data.vocabulary import SentencePiece
from meliad_rec.generation.text import Speller
from tests.data.vocabulary_test import EXACT
from tests.data.vocabulary_test import SENTENCES
from tests.pieces import train

TEXT = '  wörds, \u20ac and \U0001d11e, twice wörds \u20ac  \n'


@pytest.fixture(scope='module')
def pieces(tmp_path_factory):
  """A small vocabulary with bytes for what it does not know."""
  path = tmp_path_factory.mktemp('model') / 'exact.model'
  model = train(SENTENCES, 300, **EXACT, add_dummy_prefix=False)
  path.write_bytes(model)
  return SentencePiece(path)


@pytest.mark.parametrize('size', [1, 2, 3])
@pytest.mark.parametrize('kind', ['bytes', 'pieces'])
def test_pieces_are_the_text(kind, size, pieces):
  vocabulary = Bytes() if kind == 'bytes' else pieces
  ids = vocabulary.encode(TEXT)
  speller = Speller(vocabulary)
  parts = [speller.add(ids[i : i + size]) for i in range(0, len(ids), size)]
  assert ''.join(parts) + speller.end() == vocabulary.decode(ids)
  assert '\ufffd' not in ''.join(parts)


@pytest.mark.parametrize('cut', range(1, 20))
def test_goes_on_behind_what_was_read(cut, pieces):
  for vocabulary in (Bytes(), pieces):
    ids = vocabulary.encode(TEXT)
    first = Speller(vocabulary)
    before = first.add(ids[:cut])
    after = Speller(vocabulary, ids[:cut][-4:]).add(ids[cut:])
    assert before + after == vocabulary.decode(ids)


def test_a_broken_character_is_said():
  ids = Bytes().encode('\u20ac')
  speller = Speller(Bytes())
  assert speller.add(ids[:2]) == ''
  assert speller.end() == '\ufffd'
  assert Speller(Bytes()).add(np.concatenate([ids[:1], ids])) == '\ufffd\u20ac'
