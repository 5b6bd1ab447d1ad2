"""Text written in pieces is the text of the tokens."""

import jax
import numpy as np
import pytest

from meliad_rec.data.vocabulary import Bytes
from meliad_rec.generation.decoder import Decoder
from meliad_rec.generation.sampling import Sampler
from meliad_rec.generation.text import Writer
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from tests import architectures as tiny


@pytest.fixture(scope='module')
def writer():
  model = Model(Bytes.size, tiny.windowed(1), tiny.D)
  params = jax.jit(lambda: initialize(model, jax.random.key(0), 1, tiny.W))()
  return Writer(Decoder(model, params, tiny.W, chunk=5), Bytes())


def test_pieces_are_the_text_of_the_tokens(writer):
  sampler = Sampler()
  reading = writer.read('é').repeat(2)
  written = list(writer.write(reading, 12, sampler, seed=1))
  ids = writer.decoder.generate(reading, 12, sampler, seed=1)
  ids_BT = np.concatenate([part for _, part in ids], 1)
  for row in range(2):
    text = ''.join(pieces[row] for _, pieces in written)
    assert text == Bytes().decode(ids_BT[row])
  assert int(written[-1][0].count) == 14


def test_reading_in_parts_is_reading(writer):
  whole = writer.read('a text of more than a window')
  parts = writer.read(' of more than a window', writer.read('a text'))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), whole, parts
  )


def test_nothing_read_and_nothing_written(writer):
  (only,) = writer.write(writer.read(''), 0, Sampler(), seed=0)
  assert only[1] == ['']
