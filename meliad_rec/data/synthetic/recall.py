r"""Recall: a name is given once and asked for when attention no longer sees it.

With two letters and a countdown from 3, a document reads

  name:QD 03 02 01
  name?QD 03 02 01
  name?QD ...

Because of the countdown, everything except the names is predictable. A model
that remembers the name has a loss only where the name is given; a model that
forgets the name has the same loss again at every question.
"""

import dataclasses

import numpy as np

from meliad_rec.data.dataset import Cached
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.documents import SPLITS
from meliad_rec.data.synthetic import labeled
from meliad_rec.data.vocabulary import Bytes

ALPHABET = 'ABCDEFGHIJKLMNOP'


@dataclasses.dataclass(frozen=True)
class Recall(Cached):
  """The recall task, with splits train, validation and test.

  Attributes:
    documents_in_train: number of documents in train; validation and test have a
      tenth each.
    questions: number of times the name is asked for.
    letters: number of letters in a name, at most 6; each is one of 16.
    countdown: count of numbers between a name and the next question, at most
      99; each has 3 tokens. If each layer attends to the last `window` tokens,
      all layers together reach back window * layers tokens.
    seed: seed of the names.
  """

  documents_in_train: int = 20_000
  questions: int = 3
  letters: int = 4
  countdown: int = 39
  seed: int = 0

  vocabulary = Bytes()
  splits = SPLITS

  def __post_init__(self):
    for name, least, most in (
      ('documents_in_train', 1, None),
      ('questions', 1, None),
      ('letters', 1, 6),
      ('countdown', 1, 99),
      ('seed', 0, 2**32 - 1),
    ):
      value = getattr(self, name)
      labeled.check_setting(f'recall.Recall.{name}', value, least, most)

  def _documents(self, split):
    rows = labeled.split_rows(split, self.documents_in_train)
    total = labeled.total_rows(self.documents_in_train)
    # All names in random order, as numbers; splits share no names.
    names = np.random.RandomState(self.seed).permutation(
      len(ALPHABET) ** self.letters
    )
    if total > len(names):
      raise ValueError(
        f'{total} documents need as many names, but {self.letters} letters '
        f'give only {len(names)}. Increase recall.Recall.letters.'
      )
    return Documents.collect(map(self._document, names[rows]), self.vocabulary)

  def text(self, name: str) -> str:
    """Returns the text of the document that gives and asks for a name."""
    filler = ''.join(f'{i:02d} ' for i in range(self.countdown, 0, -1))
    marks = ':' + '?' * self.questions
    return ''.join(f'name{mark}{name} {filler}\n' for mark in marks)

  def _document(self, number: int) -> Document:
    name = ''
    for _ in range(self.letters):
      number, letter = divmod(int(number), len(ALPHABET))
      name += ALPHABET[letter]
    text = self.text(name)
    return Document(
      name, self.vocabulary.encode(text), len(text), len(text.split())
    )
