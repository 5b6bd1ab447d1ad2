"""The text that a training run writes."""

import dataclasses

import numpy as np

from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.vocabulary import Bytes
from meliad_rec.generation.sample import Sample
from meliad_rec.generation.sampling import Sampler

TEXT = 'Once upon a time'


@dataclasses.dataclass
class Parrot:
  """Stands for a decoder: reads the prompt, and says what it was told to."""

  says: str

  def start(self, rows):
    assert rows == 1

  def read(self, reading, tokens_BT):
    self.prompt_BT = tokens_BT

  def generate(self, reading, length, sampler, seed):
    self.asked = length, sampler, seed
    ids_BT = Bytes().encode(self.says)[None]
    yield None, ids_BT[:, :2]
    yield None, ids_BT[:, 2:]


def documents(text=TEXT):
  ids = Bytes().encode(text)
  return Documents.collect([Document('a', ids, len(ids), 1)], Bytes())


def test_the_prompt_a_bar_and_what_was_written():
  sampler = Sampler(temperature=0.5)
  sample = Sample(prompt=4, length=5, sampler=sampler, seed=3)
  parrot = Parrot('hello')
  assert sample.write(parrot, documents(), Bytes()) == 'Once|hello'
  assert parrot.asked == (5, sampler, 3)
  np.testing.assert_array_equal(parrot.prompt_BT[0], Bytes().encode('Once'))


def test_a_document_shorter_than_the_prompt():
  sample = Sample(prompt=100, length=5)
  assert sample.write(Parrot('!!'), documents(), Bytes()) == f'{TEXT}|!!'
