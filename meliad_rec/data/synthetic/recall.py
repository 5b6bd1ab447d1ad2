r"""Recall: a name given once, asked for again far outside of attention.

A document of three questions, with gap 7 and two letters, reads

  name:QD 03 02 01 \n name?QD 03 02 01 \n name?QD ...

The countdown is what makes everything but the names predictable: the bits of a
document are those of its name, once, for a model that remembers, and again
for every question for one that does not.
"""

import dataclasses

import numpy as np

from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.synthetic import labelled
from meliad_rec.data.vocabulary import Bytes

ALPHABET = 'ABCDEFGHIJKLMNOP'


@dataclasses.dataclass(frozen=True)
class Recall:
  """The splits train, validation and test of the task.

  Attributes:
    documents_in_train: the other splits have a tenth each.
    questions: times the name is asked for.
    letters: of a name, each one of 16; at most 6.
    countdown: numbers between a name and the next question, of 3 tokens each;
      at most 99. Attention reaches window * layers tokens.
    seed: of the names.
  """

  documents_in_train: int = 20_000
  questions: int = 3
  letters: int = 4
  countdown: int = 39
  seed: int = 0

  vocabulary = Bytes()
  splits = ('train', 'validation', 'test')

  def __post_init__(self):
    for name, least, most in (
      ('documents_in_train', 1, None),
      ('questions', 1, None),
      ('letters', 1, 6),
      ('countdown', 1, 99),
      ('seed', 0, 2**32 - 1),
    ):
      value = getattr(self, name)
      labelled.check(f'recall.Recall.{name}', value, least, most)

  def documents(self, split: str) -> Documents:
    """All documents of a split."""
    if split not in self.splits:
      raise ValueError(
        f'The recall task has no split {split!r}; it has '
        f'{", ".join(self.splits)}.'
      )
    place = self.splits.index(split)
    count = self.documents_in_train if place == 0 else self.tenth
    # Numbers of names, all different, so that no split holds another's.
    names = np.random.RandomState(self.seed).permutation(
      len(ALPHABET) ** self.letters
    )
    ends = np.cumsum([self.documents_in_train, self.tenth, self.tenth])
    if ends[-1] > len(names):
      raise ValueError(
        f'{ends[-1]} documents need as many names; {self.letters} letters give '
        f'{len(names)}. Set recall.Recall.letters.'
      )
    chosen = names[ends[place] - count : ends[place]]
    return Documents.collect(map(self._document, chosen), self.vocabulary)

  @property
  def tenth(self) -> int:
    return max(self.documents_in_train // 10, 1)

  def text(self, name: str) -> str:
    """A document in which this name is asked for."""
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
