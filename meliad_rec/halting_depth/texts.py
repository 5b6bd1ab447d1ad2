"""Texts that a run reads, and what it did with them, in words."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from meliad_rec.data.document import count_words
from meliad_rec.data.document import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.data.word_vocabulary import Words
from meliad_rec.halting_depth.nesting import bracket_steps
from meliad_rec.halting_depth.nesting import levels
from meliad_rec.halting_depth.reading import Depths
from meliad_rec.run import TrainedRun

_START, _END = 'START', 'END'
_BETWEEN = '||'  # The two texts of a pair.


@dataclasses.dataclass(frozen=True)
class Line:
  """A text in reading order.

  Attributes:
    title: steps in short, and the label of the text where it has one.
    words: of each token.
    levels: brackets around each; 0 where there are none.
    steps: taken at each.
    labels: that the model gives each; None: it gives tokens none.
    together: whether there is one number of steps for all.
  """

  title: str
  words: Sequence[str]
  levels: Sequence[int]
  steps: Sequence[int]
  labels: Sequence[str] | None
  together: bool

  def __str__(self) -> str:
    """The title, and a line for each token, or one for all where all halt
    together and have no labels."""
    if self.together and self.labels is None:
      return f'{self.title}: {" ".join(self.words)}'
    labels = self.labels or [''] * len(self.words)
    wide = max(map(len, labels))
    rows = zip(self.steps, labels, self.levels, self.words, strict=True)
    return '\n'.join(
      [
        self.title,
        *(
          f'{steps:>5}  {label:{wide}}  {"  " * level}{word}'
          for steps, label, level, word in rows
        ),
      ]
    )


def documents_of(run: TrainedRun, texts: Sequence[str]) -> Documents:
  """Texts as documents of the run's kind: labelled or not, pairs or not.

  Raises:
    ValueError: a text is empty, has unknown words, or is no pair for a run that
      judges pairs.
  """
  pairs = run.forward.model.sequences > 1
  documents = []
  for text in texts:
    parts = text.split(_BETWEEN) if pairs else [text]
    if pairs and len(parts) != 2:
      raise ValueError(
        f'The run judges pairs of texts, and this is {text!r}; write two with '
        f'{_BETWEEN} between them.'
      )
    sides = [encode(run.vocabulary, part) for part in parts]
    tokens = np.concatenate(sides)
    if not tokens.size:
      raise ValueError('A text to read is empty; give it one token or more.')
    labels = np.zeros_like(tokens) if run.labels else None
    middle = len(sides[0]) if pairs else None
    size, words = len(text.encode()), count_words(text)
    documents.append(Document(text, tokens, size, words, labels, middle))
  return Documents.collect(documents, run.vocabulary)


def encode(vocabulary: Vocabulary, text: str) -> np.ndarray:
  """Ids of a text, in START and END where the vocabulary has these words."""
  if isinstance(vocabulary, Words):
    words = text.split()
    if _START in vocabulary.words and words[:1] != [_START]:
      words.insert(0, _START)
    if _END in vocabulary.words and words[-1:] != [_END]:
      words.append(_END)
    text = ' '.join(words)
  return vocabulary.encode(text)


def line_of(run: TrainedRun, depths: Depths, i: int) -> Line:
  """What the run did with document i."""
  ids, vocabulary = depths.documents[i], run.vocabulary
  steps, begins, answers = depths.of(i)
  brackets = bracket_steps(vocabulary)
  together = bool(begins.sum() == 1)
  title = f'{steps[begins].mean():.2f} steps, {steps.max()} at most'
  if together:
    title = f'{steps[0]} steps for all {len(ids)} tokens'
  head = run.forward.model.head
  labels = [named(vocabulary, id_) for id_ in answers] if run.labels else None
  if labels and head is not None and head.pool is not None:
    title, labels = f'label {labels[-1]}, {title}', None
  return Line(
    title=title,
    words=spelled(vocabulary, ids),
    levels=[0] * len(ids) if brackets is None else levels(brackets, ids),
    steps=steps,
    labels=labels,
    together=together,
  )


def named(vocabulary: Vocabulary, label: int) -> str:
  """The word that has a label's id, or the id."""
  if isinstance(vocabulary, Words) and 1 <= label < vocabulary.size:
    return vocabulary.words[label - 1]
  return str(label)


def spelled(vocabulary: Vocabulary, ids: np.ndarray) -> list[str]:
  """Each token in letters, without the space before it."""
  pieces = [b.decode('utf-8', 'replace') for b in vocabulary.token_bytes(ids)]
  return [piece.strip() or repr(piece) for piece in pieces]
