"""The documents of one split, tokenised: one array and where each starts."""

from collections.abc import Iterable
import dataclasses
import functools
import hashlib
from typing import NamedTuple

import numpy as np

from meliad_rec.data.vocabulary import Vocabulary

SPLITS = ('train', 'validation', 'test')


class Document(NamedTuple):
  """One tokenised document: name, ids [n], UTF-8 bytes, whitespace words.

  Where tokens are labelled, `labels` are ids [n] too; 0 is not scored.
  """

  name: str
  tokens: np.ndarray
  bytes_: int
  words: int
  labels: np.ndarray | None = None


def count_words(text: str) -> int:
  """Words between whitespace, as PG19's published counts are."""
  return len(text.split())


def token_dtype(vocabulary_size: int) -> np.dtype:
  """The smallest little-endian dtype that holds every id."""
  return np.dtype('<u2' if vocabulary_size <= 2**16 else '<u4')


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

  Raises:
    ValueError: labels are not one for each token, or only some documents have
      them.
  """

  tokens: np.ndarray
  starts: np.ndarray
  bytes_: np.ndarray
  words: np.ndarray
  names: list[str]
  tokens_sha256: str | None = None
  labels: np.ndarray | None = None

  def __post_init__(self):
    if self.labels is not None and self.labels.shape != self.tokens.shape:
      raise ValueError(
        f'There are {len(self.labels)} labels for {len(self.tokens)} tokens; '
        'give each token one, 0 where it is not scored, or none.'
      )

  @classmethod
  def collect(
    cls, documents: Iterable[Document], vocabulary: Vocabulary
  ) -> 'Documents':
    """Gathers documents in memory."""
    dtype = token_dtype(vocabulary.size)
    tokens, bytes_, words, names = [np.zeros(0, dtype)], [], [], []
    labels = [np.zeros(0, dtype)]
    for document in documents:
      tokens.append(document.tokens.astype(dtype))
      bytes_.append(document.bytes_)
      words.append(document.words)
      names.append(document.name)
      if document.labels is not None:
        labels.append(document.labels.astype(dtype))
    lengths = [len(part) for part in tokens]
    labelled = len(labels) > 1
    if labelled and [len(part) for part in labels] != lengths:
      raise ValueError(
        f'{len(labels) - 1} of {len(names)} documents have labels, '
        f'{sum(map(len, labels))} for {sum(lengths)} tokens; give each token '
        'of a split one, 0 where it is not scored, or none.'
      )
    return cls(
      tokens=np.concatenate(tokens),
      starts=np.cumsum(lengths, dtype=np.int64),
      bytes_=np.asarray(bytes_, np.int64),
      words=np.asarray(words, np.int64),
      names=names,
      labels=np.concatenate(labels) if labelled else None,
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
      tokens: tokens to keep of each document; None: all.
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
    )
    if tokens is None or not (part.lengths > tokens).any():
      return part
    if vocabulary is None:
      raise ValueError(
        f'Documents are to be cut to {tokens} tokens, which needs the '
        'vocabulary to count what is left; give vocabulary.'
      )
    return Documents.collect(
      (part._cut(i, tokens, vocabulary) for i in range(kept)), vocabulary
    )

  def _cut(self, i: int, tokens: int, vocabulary: Vocabulary) -> Document:
    ids, labels = self[i][:tokens], None
    bytes_, words = int(self.bytes_[i]), int(self.words[i])
    if self.labels is not None:
      labels = self.labels[self.starts[i] :][: len(ids)]
    if self.lengths[i] > tokens:
      text = b''.join(vocabulary.token_bytes(ids))
      bytes_ = len(text)
      words = count_words(text.decode('utf-8', 'replace'))
    return Document(self.names[i], ids, bytes_, words, labels)
