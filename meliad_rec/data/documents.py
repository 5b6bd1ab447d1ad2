"""The documents of one split, tokenised: one array and where each starts.

One tokenised document.

Labels, where it is not the next token that is to be predicted.

A label is of a token, or of a pair of sequences: each pair is a document, the
second sequence behind the first, and its label lies on its last token.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import functools
import hashlib
from typing import NamedTuple

import numpy as np

from meliad_rec.data.vocabulary import Vocabulary


class Document(NamedTuple):
  """One tokenised document: name, ids [n], UTF-8 bytes, whitespace words.

  Where tokens are labelled, `labels` are ids [n] too; 0 is not scored. Of a
  pair of sequences, the first `middle` tokens are the first of them.
  """

  name: str
  tokens: np.ndarray
  bytes_: int
  words: int
  labels: np.ndarray | None = None
  middle: int | None = None


def count_words(text: str) -> int:
  """Words between whitespace, as PG19's published counts are."""
  return len(text.split())


def token_dtype(vocabulary_size: int) -> np.dtype:
  """The smallest little-endian dtype that holds every id."""
  return np.dtype('<u2' if vocabulary_size <= 2**16 else '<u4')


def check_ids(document: Document, vocabulary: Vocabulary) -> None:
  """Raises ValueError where an id is 0, padding, or outside the vocabulary."""
  ids = document.tokens
  if len(ids) and not (ids.min() > 0 and ids.max() < vocabulary.size):
    raise ValueError(
      f'The document {document.name!r} holds an id outside 1 to '
      f'{vocabulary.size - 1}; tokenise it with another vocabulary.'
    )


def check(
  tokens: np.ndarray,
  starts: np.ndarray,
  labels: np.ndarray | None,
  middles: np.ndarray | None,
) -> None:
  """Raises ValueError where labels do not fit their documents.

  Args:
    tokens: ids of all documents.
    starts: [documents + 1], where each begins.
    labels: one for each token; None: there are none.
    middles: [documents], tokens of the first sequence of each pair; None:
      documents are no pairs.
  """
  if labels is not None and labels.shape != tokens.shape:
    raise ValueError(
      f'There are {len(labels)} labels for {len(tokens)} tokens; give each '
      'token one, 0 where it is not scored, or none.'
    )
  if middles is None:
    return
  lengths = np.diff(starts)
  if middles.shape != lengths.shape:
    raise ValueError(
      f'There are {len(middles)} middles for {len(lengths)} documents; give '
      'each document one, or none.'
    )
  wrong = np.flatnonzero((middles < 1) | (middles >= lengths))
  if len(wrong):
    i = wrong[0]
    raise ValueError(
      f'The middle of document {i} is {middles[i]} of {lengths[i]} tokens; '
      'each of the two sequences of a pair needs 1 token or more.'
    )
  if labels is None:
    raise ValueError(
      'Documents have middles, and no labels; give each pair of sequences a '
      'label on its last token, or no middles.'
    )
  if np.count_nonzero(labels) > np.count_nonzero(labels[starts[1:] - 1]):
    raise ValueError(
      'A pair of sequences has a label before its last token; make it 0.'
    )


def collect_labels(
  documents: Sequence, lengths: Sequence[int]
) -> tuple[np.ndarray | None, np.ndarray | None]:
  """Labels of all tokens of some documents, and middles; None: there are none.

  Args:
    documents: whose `labels` and `middle` are read.
    lengths: tokens of each.

  Raises:
    ValueError: only some of the documents have them.
  """
  labels = [d.labels for d in documents if d.labels is not None]
  middles = [d.middle for d in documents if d.middle is not None]
  if labels and [*map(len, labels)] != [*lengths]:
    raise ValueError(
      f'{len(labels)} of {len(lengths)} documents have labels, '
      f'{sum(map(len, labels))} for {sum(lengths)} tokens; give each '
      'token of a split one, 0 where it is not scored, or none.'
    )
  if middles and len(middles) < len(lengths):
    raise ValueError(
      f'{len(middles)} of {len(lengths)} documents are pairs of sequences; '
      'give each document of a split a middle, or none.'
    )
  return (
    np.concatenate(labels) if labels else None,
    np.asarray(middles, np.int64) if middles else None,
  )


def side_lengths(middles: np.ndarray | None, lengths: np.ndarray) -> np.ndarray:
  """[documents, 1 or 2], tokens of each sequence of documents.

  Args:
    middles: [documents], tokens of the first of two; None: there is one.
    lengths: [documents], tokens of all.
  """
  if middles is None:
    return lengths[:, None]
  return np.stack([middles, lengths - middles], 1)


SPLITS = ('train', 'validation', 'test')


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
  """The documents of one split.

  Attributes:
    tokens: 1-d array of ids of all documents in order; may be memory-mapped.
    starts: int64 [documents + 1], where each document begins in `tokens`.
    bytes_: int64 [documents], UTF-8 bytes of each text.
    words: int64 [documents], words between whitespace in each text.
    names: [documents], what each was called in its source.
    tokens_sha256: of the bytes of `tokens`; None: found when it is asked for.
    labels: 1-d array like `tokens`, what is to be predicted at each; 0: not
      scored. None: the next token is to be predicted.
    middles: int64 [documents], tokens of the first of the two sequences of
      each; the rest is the second, on whose last token the pair's label lies.
      None: documents are no pairs.

  Raises:
    ValueError: labels or middles do not fit; see labels.check.
  """

  tokens: np.ndarray
  starts: np.ndarray
  bytes_: np.ndarray
  words: np.ndarray
  names: list[str]
  tokens_sha256: str | None = None
  labels: np.ndarray | None = None
  middles: np.ndarray | None = None

  def __post_init__(self):
    check(self.tokens, self.starts, self.labels, self.middles)

  @classmethod
  def collect(
    cls, documents: Iterable[Document], vocabulary: Vocabulary
  ) -> 'Documents':
    """Gathers documents in memory.

    Raises:
      ValueError: an id is 0 or outside the vocabulary.
    """
    dtype = token_dtype(vocabulary.size)
    # Written behind each other as they come: nothing is held twice.
    tokens, lengths, parts = bytearray(), [], []
    for document in documents:
      check_ids(document, vocabulary)
      tokens += document.tokens.astype(dtype).tobytes()
      lengths.append(len(document.tokens))
      labels = document.labels
      labels = None if labels is None else labels.astype(dtype)
      parts.append(document._replace(tokens=None, labels=labels))
    labels, middles = collect_labels(parts, lengths)
    return cls(
      tokens=np.frombuffer(tokens, dtype),
      starts=np.cumsum([0, *lengths], dtype=np.int64),
      bytes_=np.asarray([part.bytes_ for part in parts], np.int64),
      words=np.asarray([part.words for part in parts], np.int64),
      names=[part.name for part in parts],
      labels=labels,
      middles=middles,
    )

  def __len__(self) -> int:
    return len(self.names)

  def __getitem__(self, i: int) -> np.ndarray:
    """The ids of document i."""
    if not 0 <= i < len(self):
      raise IndexError(f'document {i} of {len(self)}')
    return self.tokens[self.starts[i] : self.starts[i + 1]]

  def read(self, i: int, at: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of `count` places of document i, from `at` on.

    Text is shifted by one token, and its first input is 0; labels are not.
    """
    begin = self.starts[i] + at
    tokens = self.tokens[begin : begin + count]
    if self.labels is not None:
      return tokens, self.labels[begin : begin + count]
    before = self.tokens[begin - 1] if at else 0
    return np.concatenate([[before], tokens[:-1]]), tokens

  @property
  def lengths(self) -> np.ndarray:
    """int64 [documents], tokens in each."""
    return np.diff(self.starts)

  @functools.cached_property
  def identity(self) -> str:
    """sha256 of all but the names: equal only for equal content."""
    digest = self.tokens_sha256 or hashlib.sha256(self.tokens.data).hexdigest()
    whole = hashlib.sha256(digest.encode())
    for facts in (self.starts, self.bytes_, self.words):
      whole.update(facts.astype('<i8').tobytes())
    if self.labels is not None:
      whole.update(np.ascontiguousarray(self.labels).data)
    if self.middles is not None:
      whole.update(self.middles.astype('<i8').tobytes())
    return whole.hexdigest()

  def head(
    self,
    count: int | None = None,
    tokens: int | None = None,
    vocabulary: Vocabulary | None = None,
  ) -> 'Documents':
    """A stated part: the first documents, and the first tokens of each.

    Args:
      count: documents to keep; None: all.
      tokens: tokens to keep of each document, or sequence of a pair; None: all.
      vocabulary: what the ids mean, needed where documents are cut, to count
        the bytes and words of what is left of them.

    Raises:
      ValueError: count or tokens below 1, or tokens without a vocabulary.
    """
    for name, value in (('count', count), ('tokens', tokens)):
      if value is not None and value < 1:
        raise ValueError(
          f'The part of a split to keep has {name} = {value}; '
          f'give at least 1, or None for all.'
        )
    kept = len(self) if count is None else min(count, len(self))
    end = self.starts[kept]
    part = Documents(
      tokens=self.tokens[:end],
      starts=self.starts[: kept + 1],
      bytes_=self.bytes_[:kept],
      words=self.words[:kept],
      names=self.names[:kept],
      tokens_sha256=self.tokens_sha256 if end == len(self.tokens) else None,
      labels=None if self.labels is None else self.labels[:end],
      middles=None if self.middles is None else self.middles[:kept],
    )
    sides = side_lengths(part.middles, part.lengths)
    if tokens is None or not (sides > tokens).any():
      return part
    if vocabulary is None:
      raise ValueError(
        f'Documents are to be cut to {tokens} tokens, which needs the '
        'vocabulary to count what is left; give vocabulary.'
      )
    kept = np.minimum(sides, tokens)
    begins = np.cumsum(sides) - sides.ravel()
    spans = zip(begins, begins + kept.ravel(), strict=True)
    places = np.concatenate([np.arange(*span) for span in spans])
    part = dataclasses.replace(
      part,
      tokens=part.tokens[places],
      starts=np.cumsum([0, *kept.sum(1)]),
      bytes_=part.bytes_.copy(),
      words=part.words.copy(),
      tokens_sha256=None,
      labels=None if part.labels is None else part.labels[places],
      middles=None if part.middles is None else kept[:, 0],
    )
    for i in np.flatnonzero((sides > kept).any(1)):
      text = b''.join(vocabulary.token_bytes(part[i]))
      part.bytes_[i] = len(text)
      part.words[i] = count_words(text.decode('utf-8', 'replace'))
    return part
