"""Text from any source, tokenised in memory."""

from collections.abc import Iterable
from collections.abc import Iterator
import re
import time

from absl import logging

from meliad_rec.data import seqio_tasks
from meliad_rec.data.documents import count_words
from meliad_rec.data.documents import Document
from meliad_rec.data.documents import Documents
from meliad_rec.data.documents import SPLITS
from meliad_rec.data.sources import Pg19
from meliad_rec.data.sources import Registered
from meliad_rec.data.sources import Source
from meliad_rec.data.vocabulary import Vocabulary


class Text:
  """The splits of a source, tokenised in memory as they are asked for.

  Attributes:
    source: where the documents come from.
    vocabulary: what turns them into ids.
    splits: those that the source has.

  Raises:
    ValueError: the source is not there, or has another vocabulary.
  """

  def __init__(self, source: Source, vocabulary: Vocabulary):
    self.source = source
    self.vocabulary = vocabulary
    self._task = seqio_tasks.find(source, vocabulary)
    self._documents = {}
    self.splits = [
      *(split for split in SPLITS if split in self._task.splits),
      *(split for split in self._task.splits if split not in SPLITS),
    ]

  def documents(self, split: str) -> Documents:
    """All documents of a split, in memory; tokenised once."""
    if split not in self._documents:
      self._documents[split] = self._tokenise(split)
    return self._documents[split]

  def _tokenise(self, split: str) -> Documents:
    began = time.monotonic()
    logging.info(
      'Tokenising %s, split %s, in memory; python -m meliad_rec tokenize '
      'writes a store once, and runs that read it start at once.',
      self.source.description,
      split,
    )
    documents = Documents.collect(self.stream(split), self.vocabulary)
    logging.info(
      'Tokenised %d documents, %d tokens, in %.0f s.',
      len(documents),
      len(documents.tokens),
      time.monotonic() - began,
    )
    return documents

  def stream(self, split: str) -> Iterator[Document]:
    """The documents of a split one by one, in the source's order.

    Raises:
      ValueError: no such split, or what the source says is wrong in it.
    """
    _check_split(self.source, self.splits, split)
    return (
      self._document(f'{split}-{number}', example)
      for number, example in enumerate(_examples(self._task, split))
    )

  def _document(self, number: str, example: dict) -> Document:
    ids = example['targets']
    text = example.get('targets_pretokenized')
    if text is None:
      text = b''.join(self.vocabulary.token_bytes(ids))
    words = count_words(text.decode('utf-8', 'replace'))
    name = example.get('name', number.encode()).decode()
    return Document(name, ids, len(text), words)


def texts(source: Source, split: str) -> Iterator[str]:
  """The texts of a split, without ids.

  Raises:
    ValueError: no such split, or what the source says is wrong in it.
  """
  reads = not isinstance(source, Pg19 | Registered)
  provider = source if reads else seqio_tasks.find(source, None)
  _check_split(source, provider.splits, split)
  if reads:
    yield from (text for _, text in source.read(split))
    return
  for example in _examples(provider, split):
    if 'targets_pretokenized' not in example:
      raise ValueError(
        f"{source.description} has no feature 'targets_pretokenized', its text "
        'before it was tokenised; let its task keep it.'
      )
    yield example['targets_pretokenized'].decode()


def _check_split(source: Source, splits: Iterable[str], split: str) -> None:
  if split not in splits:
    raise ValueError(
      f'{source.description} has no split {split!r}; '
      f'it has {", ".join(splits)}.'
    )


def _examples(task, split: str) -> Iterator[dict]:
  import tensorflow as tf

  try:
    yield from seqio_tasks.examples(task, split).as_numpy_iterator()
  except tf.errors.OpError as error:
    # A reader's own sentence comes back inside TensorFlow's.
    told = re.search(r'ValueError: (.*)', str(error))
    if not told:
      raise
    raise ValueError(told[1]) from error
