"""Losses are stored with their text, and other files are errors."""

import dataclasses
import json

import numpy as np
import pytest

from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.synthetic.random_walk import RandomWalk
from meliad_rec.data.text import document
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.data.vocabulary import WordList
from meliad_rec.evaluation.compare import compare
from meliad_rec.evaluation.token_losses import TokenLosses

TEXTS = ['é one', '', 'two']


def losses(seed=0) -> TokenLosses:
  documents = Documents.collect(
    (
      Document(f'd{i}', Bytes().encode(text), len(text.encode()), 1)
      for i, text in enumerate(TEXTS)
    ),
    Bytes(),
  )
  made = TokenLosses.of(documents, Bytes())
  for i, part in enumerate(made.parts):
    part[:] = np.random.default_rng((seed, i)).random(len(part))
  made.about['step'] = 3
  return made


def test_written_and_read(tmp_path):
  """Losses are filled through parts, which are views of each document."""
  made = losses()
  made.write(tmp_path / 'a.npz')
  again = TokenLosses.load(tmp_path / 'a.npz')
  for name in ('tokens', 'nats', 'starts', 'bytes_', 'text'):
    a, b = getattr(made, name), getattr(again, name)
    np.testing.assert_array_equal(a, b)
    assert a.dtype == b.dtype
  assert again.names == made.names
  assert again.about == {'document_bytes': 9, 'step': 3}
  assert [path.name for path in tmp_path.iterdir()] == ['a.npz']
  assert [len(part) for part in again.parts] == [6, 0, 3]
  assert again.nats.all()
  assert again.text.tobytes().decode() == ''.join(TEXTS)
  assert again.document_of(np.arange(9)).tolist() == 6 * [0] + 3 * [2]
  np.testing.assert_array_equal(again.bytes_, np.arange(10))


def test_losses_of_a_target_lie_on_the_target():
  pairs = [('hello\n', 'uv\n'), ('a\n', 'xyz\n')]
  encode = Bytes().encode
  documents = Documents.collect(
    (
      Document(a, encode(a + b), len(b), 1, first_length=len(a))
      for a, b in pairs
    ),
    Bytes(),
  )
  made = TokenLosses.of(documents, Bytes())
  assert [len(part) for part in made.parts] == [3, 4]
  assert made.text.tobytes() == b'uv\nxyz\n'
  np.testing.assert_array_equal(made.tokens, encode('uv\nxyz\n'))


def test_bits_per_byte_are_of_the_text_as_it_was():
  """A list of words spells neither spaces nor unknown words as they were."""
  words = WordList(['a', '<eos>', '<unk>'])
  text = 'a  zebra\n'
  made = TokenLosses.of(
    Documents.collect([document('', text, words)], words), words
  )
  made.nats[:] = np.log(2)
  assert made.text.tobytes() == b'a <unk>\n'
  assert made.bits_per_byte == pytest.approx(3 / len(text))
  older = dataclasses.replace(made, about={})
  assert older.bits_per_byte == pytest.approx(3 / len('a <unk>\n'))
  assert f'{3 / len(text):12.4f}' in compare(made, made, 1, 'token')
  wrong = dataclasses.replace(made, about={'document_bytes': 'x'})
  assert made.is_sound() and not wrong.is_sound()


def test_labeled_documents_are_an_error():
  task = RandomWalk(episodes=9)
  with pytest.raises(ValueError, match='--out'):
    TokenLosses.of(task.documents('test'), task.vocabulary)


META = json.dumps({'kind': 'token losses', 'facts': {'names': 3}})


@pytest.mark.parametrize(
  'change',
  [
    {'nats': np.zeros(8, np.float32)},
    {'nats': np.zeros(9, np.float64)},
    {'starts': np.array([0, 6, 5, 9])},
    {'bytes': np.arange(10) - 1},
    {'text': np.array([{}], object)},
    {'meta': np.frombuffer(b'{}', np.uint8)},
    {'meta': np.frombuffer(META.encode(), np.uint8)},
  ],
)
def test_other_files_are_errors(tmp_path, change):
  losses().write(tmp_path / 'a.npz')
  arrays = dict(np.load(tmp_path / 'a.npz'))
  np.savez(tmp_path / 'b.npz', **arrays | change)
  with pytest.raises(ValueError, match='b.npz'):
    TokenLosses.load(tmp_path / 'b.npz')
