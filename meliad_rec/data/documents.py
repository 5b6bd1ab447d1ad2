"""Tokenized documents: one `Document`, and the `Documents` of a whole split.

Most documents are text, and the next token is the target. Most synthetic tasks
have labels instead: one for each scored token, or one for a pair of sequences.
A pair is one document: the second sequence follows the first, and the label of
the pair is on the last token of the document. A pair without a label is a
source and its target, of which only the target is predicted.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meliad_rec.data.vocabulary import Vocabulary

SPLITS = ('train', 'validation', 'test')


class Document(NamedTuple):
  """One tokenized document.

  Attributes:
    name: name of the document in its source.
    tokens: ids of the n tokens, [n].
    bytes_: number of UTF-8 bytes of the text.
    words: number of whitespace-separated words of the text.
    labels: ids of the labels, [n]; 0 at tokens that are not scored. None means
      that the target is the next token.
    first_length: number of tokens in the first sequence of a pair. None means
      that the document is not a pair.
  """

  name: str
  tokens: np.ndarray
  bytes_: int
  words: int
  labels: np.ndarray | None = None
  first_length: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
  """The documents of one split, concatenated.

  Attributes:
    tokens: 1-d array of the ids of all documents in order; may be
      memory-mapped.
    starts: int64 [documents + 1], where each document begins in `tokens`; the
      last entry is where the last document ends.
    bytes_: int64 [documents], number of UTF-8 bytes of each text.
    words: int64 [documents], number of whitespace-separated words of each text.
    names: [documents], the name of each document in its source.
    tokens_sha256: sha256 of the bytes of `tokens`. None means that it is
      computed when it is needed.
    labels: 1-d array like `tokens`, the label of each token; 0 at tokens that
      are not scored. None means that the target is the next token.
    first_lengths: int64 [documents], tokens in the first sequence of each pair;
      the rest is the second sequence. Without labels, the first one is a source
      and the second one its target. None means that documents are not pairs.
    vocabulary_size: size of the vocabulary; ids are checked against it when
      they are read. None means that they have been checked already.

  Raises:
    ValueError: labels or first_lengths do not fit the documents.
  """

  tokens: np.ndarray
  starts: np.ndarray
  bytes_: np.ndarray
  words: np.ndarray
  names: list[str]
  tokens_sha256: str | None = None
  labels: np.ndarray | None = None
  first_lengths: np.ndarray | None = None
  vocabulary_size: int | None = None

  def __post_init__(self):
    if self.labels is not None and self.labels.shape != self.tokens.shape:
      raise ValueError(
        f'There are {len(self.labels)} labels for {len(self.tokens)} tokens. '
        'Give one label per token, 0 where it is not scored, or no labels.'
      )
    if self.first_lengths is not None:
      self._check_pairs()

  def _check_pairs(self) -> None:
    lengths, first_lengths = self.lengths, self.first_lengths
    if first_lengths.shape != lengths.shape:
      raise ValueError(
        f'There are {len(first_lengths)} first_lengths for {len(lengths)} '
        'documents. Give one per document, or none.'
      )
    wrong = np.flatnonzero((first_lengths < 1) | (first_lengths >= lengths))
    if len(wrong):
      i = wrong[0]
      raise ValueError(
        f'Document {self.names[i]!r} has {lengths[i]} tokens and first_length '
        f'{first_lengths[i]}, but both sequences of a pair need at least 1 '
        'token. Correct its first_length, or leave the document out.'
      )
    if self.labels is None:
      return
    last_labels = self.labels[self.starts[1:] - 1]
    if np.count_nonzero(self.labels) > np.count_nonzero(last_labels):
      early = np.setdiff1d(np.flatnonzero(self.labels), self.starts[1:] - 1)[0]
      i = np.searchsorted(self.starts, early, 'right') - 1
      raise ValueError(
        f'Document {self.names[i]!r} is a pair of sequences, so only its last '
        f'token may have a label, but token {early - self.starts[i]} (of 0 to '
        f'{lengths[i] - 1}) has the label {self.labels[early]}. Set that label '
        'to 0.'
      )

  @classmethod
  def collect(
    cls, documents: Iterable[Document], vocabulary: Vocabulary
  ) -> 'Documents':
    """Returns documents concatenated in memory.

    Raises:
      ValueError: an id is 0, an id or label is outside the vocabulary, only
        some documents have labels, only some are pairs, or labels or pairs do
        not fit the tokens.
    """
    dtype = token_dtype(vocabulary.size)
    # Ids are appended as they arrive, so that memory holds them only once.
    tokens, lengths, others = bytearray(), [], []
    for document in documents:
      check_ids(document, vocabulary)
      tokens += document.tokens.astype(dtype).tobytes()
      lengths.append(len(document.tokens))
      labels = document.labels
      labels = None if labels is None else labels.astype(dtype)
      others.append(document._replace(tokens=None, labels=labels))
    return cls(
      tokens=np.frombuffer(tokens, dtype),
      starts=np.cumsum([0, *lengths], dtype=np.int64),
      bytes_=np.asarray([other.bytes_ for other in others], np.int64),
      words=np.asarray([other.words for other in others], np.int64),
      names=[other.name for other in others],
      labels=_collect_labels(others, lengths),
      first_lengths=_collect_first_lengths(others),
    )

  def __len__(self) -> int:
    return len(self.names)

  def __getitem__(self, i: int) -> np.ndarray:
    """Returns the ids of document i.

    Raises:
      IndexError: there is no document i.
      ValueError: an id is 0 or outside the vocabulary.
    """
    if not 0 <= i < len(self):
      raise IndexError(
        f'There is no document {i}. Give an index from 0 to {len(self) - 1}.'
      )
    return self._ids(slice(*self.starts[i : i + 2]))

  def _ids(self, which: slice | np.ndarray) -> np.ndarray:
    ids = self.tokens[which]
    if self.vocabulary_size is not None:
      check_range(ids, self.vocabulary_size, self.tokens.filename)
    return ids

  def read(
    self, i: int, offset: int, count: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns `count` inputs and `count` targets of document i.

    The first target belongs to token `offset` of the document, counted from 0.
    The document must have at least `offset + count` tokens.

    In text, the targets are tokens, and each input is the token before its
    target; the input for the first token is 0. In labeled documents, the inputs
    are tokens, and the targets are their labels.

    Raises:
      ValueError: an id is 0 or outside the vocabulary.
    """
    begin = self.starts[i] + offset
    tokens = self._ids(slice(begin, begin + count))
    if self.labels is not None:
      return tokens, self.labels[begin : begin + count]
    before = self.tokens[begin - 1] if offset else 0
    return np.concatenate([[before], tokens[:-1]]), tokens

  @property
  def lengths(self) -> np.ndarray:
    """int64 [documents], tokens in each document."""
    return np.diff(self.starts)

  @property
  def have_sources(self) -> bool:
    """Whether each document is a source and its target."""
    return self.first_lengths is not None and self.labels is None

  @property
  def tokens_read(self) -> int:
    """Number of tokens of all documents, without sources."""
    lengths = self.sequence_lengths
    return int(lengths[:, -1].sum() if self.have_sources else lengths.sum())

  @property
  def sequence_lengths(self) -> np.ndarray:
    """Number of tokens in each sequence of each document, int64.

    The shape is [documents, 2] for pairs, and otherwise [documents, 1]: a
    document that is not a pair is a single sequence.
    """
    if self.first_lengths is None:
      return self.lengths[:, None]
    return np.stack([self.first_lengths, self.lengths - self.first_lengths], 1)

  @functools.cached_property
  def identity(self) -> str:
    """sha256, in hexadecimal, of all arrays; it does not depend on names."""
    digest = self.tokens_sha256 or hashlib.sha256(self.tokens.data).hexdigest()
    whole = hashlib.sha256(digest.encode())
    for array in (self.starts, self.bytes_, self.words):
      whole.update(array.astype('<i8').tobytes())
    if self.labels is not None:
      whole.update(np.ascontiguousarray(self.labels).data)
    if self.first_lengths is not None:
      whole.update(self.first_lengths.astype('<i8').tobytes())
    return whole.hexdigest()

  def head(
    self,
    count: int | None = None,
    tokens: int | None = None,
    vocabulary: Vocabulary | None = None,
  ) -> 'Documents':
    """Returns only the first documents, the first tokens of each, or both.

    The label of a token is cut with the token, so a pair loses its label if its
    second sequence is cut.

    Args:
      count: number of documents to keep. None: all.
      tokens: number of tokens to keep of each document, or of each sequence of
        a pair. None: all.
      vocabulary: the vocabulary of the ids. Needed if documents are cut, to
        count the bytes and words that remain.

    Raises:
      ValueError: count or tokens is below 1, or documents must be cut and the
        vocabulary is None.
    """
    for name, value in (('count', count), ('tokens', tokens)):
      if value is not None and value < 1:
        raise ValueError(
          f'{name} must be None or at least 1, got {value}. Give None to keep '
          'all.'
        )
    part = self._first(len(self) if count is None else min(count, len(self)))
    lengths = part.sequence_lengths
    if tokens is None or not (lengths > tokens).any():
      return part
    if vocabulary is None:
      raise ValueError(
        f'Cutting documents to {tokens} tokens needs their vocabulary, to '
        'count the bytes and words that remain. Set the argument vocabulary.'
      )
    kept = np.minimum(lengths, tokens)
    begins = np.cumsum(lengths) - lengths.ravel()
    spans = zip(begins, begins + kept.ravel(), strict=True)
    indices = np.concatenate([np.arange(*span) for span in spans])
    cut = dataclasses.replace(
      part,
      tokens=part._ids(indices),
      starts=np.cumsum([0, *kept.sum(1)]),
      bytes_=part.bytes_.copy(),
      words=part.words.copy(),
      tokens_sha256=None,
      labels=None if part.labels is None else part.labels[indices],
      first_lengths=None if part.first_lengths is None else kept[:, 0],
      vocabulary_size=None,
    )
    for i in np.flatnonzero((lengths > kept).any(1)):
      # Of a source and its target, only the target counts.
      first = cut.first_lengths[i] if cut.have_sources else 0
      text = b''.join(vocabulary.token_bytes(cut[i][first:]))
      cut.bytes_[i] = len(text)
      cut.words[i] = count_words(text.decode('utf-8', 'replace'))
    return cut

  def _first(self, count: int) -> 'Documents':
    end = self.starts[count]
    pairs = self.first_lengths
    return Documents(
      tokens=self.tokens[:end],
      starts=self.starts[: count + 1],
      bytes_=self.bytes_[:count],
      words=self.words[:count],
      names=self.names[:count],
      tokens_sha256=self.tokens_sha256 if end == len(self.tokens) else None,
      labels=None if self.labels is None else self.labels[:end],
      first_lengths=None if pairs is None else pairs[:count],
      vocabulary_size=self.vocabulary_size,
    )


def count_words(text: str) -> int:
  """Counts whitespace-separated words, as the published counts of PG-19 do."""
  # By line, because the list of all words of a stream would fill the memory.
  return sum(len(line.split()) for line in text.splitlines())


def token_dtype(vocabulary_size: int) -> np.dtype:
  """Returns little-endian uint16, or uint32 if ids may exceed 65,535."""
  return np.dtype('<u2' if vocabulary_size <= 2**16 else '<u4')


def check_ids(document: Document, vocabulary: Vocabulary) -> None:
  """Checks the ids and labels of a document.

  Raises:
    ValueError: ids or labels are not a 1-d array of integers, an id is 0
      (padding) or outside the vocabulary, or a label is outside it.
  """
  ids, labels = document.tokens, document.labels
  for kind, found in ('ids', ids), ('labels', labels):
    if found is None or (found.ndim == 1 and found.dtype.kind in 'iu'):
      continue
    raise ValueError(
      f'The {kind} of document {document.name!r} must be a 1-d array of '
      f'integers, got {found.dtype}{list(found.shape)}. Correct its source.'
    )
  if len(ids) and not (ids.min() > 0 and ids.max() < vocabulary.size):
    wrong = ids[(ids < 1) | (ids >= vocabulary.size)][0]
    raise ValueError(
      f'Document {document.name!r} contains the token id {wrong}, but the ids '
      f'of the vocabulary are 1 to {vocabulary.size - 1}. Tokenize the '
      'document with this vocabulary.'
    )
  if labels is not None and len(labels):
    wrong = labels[(labels < 0) | (labels >= vocabulary.size)]
    if len(wrong):
      raise ValueError(
        f'Document {document.name!r} has the label {wrong[0]}, but labels are '
        f'ids of the vocabulary, 1 to {vocabulary.size - 1}, or 0 where '
        'nothing is scored. Correct it.'
      )


def check_split(
  split: str, splits: Iterable[str], owner: str = 'This task'
) -> None:
  """Raises ValueError if a split does not exist.

  Args:
    split: name of the split.
    splits: names of the splits that exist.
    owner: what has these splits, for the message.
  """
  if split not in splits:
    raise ValueError(
      f'{owner} has no split {split!r}. Choose one of {", ".join(splits)}.'
    )


def check_range(ids: np.ndarray, size: int, path: str | Path) -> None:
  """Checks that ids of a file are in the vocabulary.

  Args:
    ids: ids read from the file.
    size: size of the vocabulary.
    path: path of the file, for the message.

  Raises:
    ValueError: an id is 0 (padding) or outside the vocabulary.
  """
  if not len(ids) or (ids.min() > 0 and ids.max() < size):
    return
  wrong = ids[(ids < 1) | (ids >= size)][0]
  raise ValueError(
    f'{path} has the id {wrong}, but the ids of its vocabulary are 1 to '
    f'{size - 1}. Write the store again.'
  )


def _collect_labels(
  documents: Sequence[Document], lengths: Sequence[int]
) -> np.ndarray | None:
  """Concatenates the labels of documents; None if no document has labels.

  Args:
    documents: the documents; their `tokens` may be None.
    lengths: number of tokens of each document.

  Raises:
    ValueError: only some documents have labels, or a document does not have one
      label per token.
  """
  labels = [d.labels for d in documents if d.labels is not None]
  if not labels:
    return None
  if [*map(len, labels)] != [*lengths]:
    raise ValueError(
      f'Labels do not match tokens: {len(labels)} of {len(lengths)} documents '
      f'have labels, in all {sum(map(len, labels))} labels for {sum(lengths)} '
      'tokens. Give a label to every token of the split (0 where it is not '
      'scored), or to none.'
    )
  return np.concatenate(labels)


def _collect_first_lengths(documents: Sequence[Document]) -> np.ndarray | None:
  found = [d.first_length for d in documents if d.first_length is not None]
  if not found:
    return None
  if len(found) < len(documents):
    raise ValueError(
      f'{len(found)} of {len(documents)} documents are pairs of sequences. '
      'Give every document of the split a first_length, or none of them.'
    )
  return np.asarray(found, np.int64)
