"""Text from any source, tokenized in memory."""

from collections.abc import Iterator
import contextlib
import functools
import time

from absl import logging

from meliad_rec.data import seqio_tasks
from meliad_rec.data.documents import check_split
from meliad_rec.data.documents import count_words
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.documents import SPLITS
from meliad_rec.data.sources import Registered
from meliad_rec.data.sources import Source
from meliad_rec.data.vocabulary import open_vocabulary
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.data.vocabulary import WordList
from meliad_rec.report.console import Countdown
from meliad_rec.report.console import counted


class Text:
  """A dataset from a source of text; tokenizes a split when it is first used.

  Attributes:
    source: the source of the documents.
    vocabulary: the vocabulary to tokenize with.
    splits: names of the splits of the source.

  Raises:
    ValueError: the source does not exist, or is a seqio task with another
      vocabulary. Raised on first use.
  """

  def __init__(self, source: Source, vocabulary: Vocabulary):
    self.source = source
    self.vocabulary = vocabulary
    self._documents = {}

  @property
  def description(self) -> str:
    return self.source.description

  # Looked up lazily: `meliad-rec plan` needs only the vocabulary.
  @functools.cached_property
  def _task(self):
    return seqio_tasks.find(self.source, self.vocabulary)

  @functools.cached_property
  def splits(self) -> list[str]:
    is_task = isinstance(self.source, Registered)
    found = (self._task if is_task else self.source).splits
    return [
      *(split for split in SPLITS if split in found),
      *(split for split in found if split not in SPLITS),
    ]

  def documents(self, split: str) -> Documents:
    """Returns all documents of a split, tokenizing them on the first call.

    Raises:
      ValueError: there is no such split, or the source cannot be read.
    """
    if split not in self._documents:
      self._documents[split] = self._tokenize(split)
    return self._documents[split]

  def _tokenize(self, split: str) -> Documents:
    began = time.monotonic()
    logging.info(
      'Tokenizing %s, split %s, in memory. Write a store with '
      'meliad-rec tokenize to do this once for all runs.',
      self.source.description,
      split,
    )
    documents = Documents.collect(self.stream(split), self.vocabulary)
    logging.info(
      'Tokenized %s, %d tokens, in %.0f s.',
      counted(len(documents), 'document'),
      len(documents.tokens),
      time.monotonic() - began,
    )
    return documents

  def stream(self, split: str) -> Iterator[Document]:
    """Yields the tokenized documents of a split in the order of the source.

    Raises:
      ValueError: there is no such split, or the source cannot be read.
    """
    check_split(split, self.splits, self.source.description)
    if not isinstance(self.source, Registered):
      return _shown(
        document(name, text, self.vocabulary)
        for name, text in self.source.read(split)
      )
    return _shown(
      self._document(f'{split}-{number}', example)
      for number, example in enumerate(seqio_tasks.examples(self._task, split))
    )

  def _document(self, number: str, example: dict) -> Document:
    ids = example['targets']
    labels, first = example.get('labels'), example.get('first_length')
    text = example.get('targets_pretokenized')
    if text is None:
      # In a pair, the target is predicted, and the source is not.
      predicted = ids if labels is not None else ids[first or 0 :]
      text = b''.join(self.vocabulary.token_bytes(predicted))
    words = count_words(text.decode('utf-8', 'replace'))
    name = example.get('name', number.encode()).decode()
    return Document(name, ids, len(text), words, labels, first)


def document(name: str, text: str, vocabulary: Vocabulary) -> Document:
  """Returns a text as a tokenized document.

  Raises:
    ValueError: the text has bytes that are not UTF-8, and the vocabulary does
      not spell them.
  """
  try:
    ids = vocabulary.encode(text)
  except UnicodeEncodeError:
    raise ValueError(
      f'{name} has bytes that are not UTF-8, such as half a character where a '
      "file was cut. Set --vocabulary=bytes (in gin: VOCABULARY = 'bytes')."
    ) from None
  size = len(text.encode(errors='surrogateescape'))
  # The name of a file may have bytes that are not UTF-8.
  name = name.encode(errors='replace').decode()
  return Document(name, ids, size, count_words(text))


def _shown(documents: Iterator[Document]) -> Iterator[Document]:
  """Yields the same documents; shows the number of tokens so far on stderr."""
  tokens = 0
  with contextlib.closing(Countdown(None, 'tokens')) as countdown:
    for one in documents:
      yield one
      tokens += len(one.tokens)
      countdown.show(tokens)


def texts(source: Source, split: str) -> Iterator[str]:
  """Yields the texts of a split without tokenizing them.

  Raises:
    ValueError: there is no such split, the source cannot be read, or a seqio
      task has no feature 'targets_pretokenized'.
  """
  if not isinstance(source, Registered):
    check_split(split, source.splits, source.description)
    yield from (text for _, text in source.read(split))
    return
  task = seqio_tasks.find(source, None)
  check_split(split, task.splits, source.description)
  for example in seqio_tasks.examples(task, split):
    if 'targets_pretokenized' not in example:
      raise ValueError(
        f"{source.description} has no feature 'targets_pretokenized', the text "
        'before tokenization. Keep it in the preprocessors of its task.'
      )
    yield example['targets_pretokenized'].decode()


def vocabulary_of(source: Source, name: str) -> Vocabulary:
  """Opens a vocabulary, or collects the words of a source.

  Args:
    source: the source of the texts.
    name: 'words' for all words of the split train, the most frequent first, and
      '<eos>' for a newline; or what open_vocabulary takes.

  Raises:
    ValueError: the source or the vocabulary cannot be read.
  """
  if name == 'words':
    return WordList.collect(texts(source, 'train'))
  return open_vocabulary(name)
