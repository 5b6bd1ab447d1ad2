"""The loss of each token of documents, and a file with losses and text."""

import dataclasses
from pathlib import Path

import numpy as np

from meliad_rec.data.documents import Documents
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.storage import array_file

_KIND, _COMMAND = 'token losses', 'evaluate --out'
_DTYPES = {
  'tokens': np.dtype(np.int32),
  'nats': np.dtype(np.float32),
  'starts': np.dtype(np.int64),
  'bytes': np.dtype(np.int64),
  'text': np.dtype(np.uint8),
}


@dataclasses.dataclass(frozen=True)
class TokenLosses:
  """Losses of a model on the N tokens of some documents.

  Attributes:
    tokens: int32 [N], ids of all documents in order.
    nats: float32 [N], the loss of each token, -ln p(token).
    starts: int64 [documents + 1], where each document begins in `tokens`; the
      last entry is N.
    bytes_: int64 [N + 1], where each token begins in `text`; the last entry is
      the length of `text`.
    text: uint8, UTF-8 bytes of all documents in order.
    names: names of the documents.
    about: facts about the evaluation, as JSON values: run, step, settings,
      metrics, and 'document_bytes', the bytes of all documents as they were.
      `text` may have more or fewer, such as '<unk>' in place of a word.
  """

  tokens: np.ndarray
  nats: np.ndarray
  starts: np.ndarray
  bytes_: np.ndarray
  text: np.ndarray
  names: list[str]
  about: dict

  @classmethod
  def of(cls, documents: Documents, vocabulary: Vocabulary) -> 'TokenLosses':
    """Returns TokenLosses of these documents, with losses of 0.

    Of a source and its target, only the target is included.

    To fill in the losses, pass the result's `parts` to evaluation.evaluate as
    `losses_out`.

    Raises:
      ValueError: the documents are labeled.
    """
    if documents.labels is not None:
      raise ValueError(
        'Losses can be saved for text only, but these documents are labeled. '
        'Remove --out.'
      )
    first = documents.first_lengths if documents.have_sources else None
    tokens, spelled, starts = [], [], [0]
    for i in range(len(documents)):
      ids = documents[i] if first is None else documents[i][first[i] :]
      tokens.append(ids.astype(np.int32))
      spelled += vocabulary.token_bytes(ids)
      starts.append(len(spelled))
    lengths = np.fromiter(map(len, spelled), np.int64, len(spelled))
    return cls(
      tokens=np.concatenate([np.zeros(0, np.int32), *tokens]),
      nats=np.zeros(len(spelled), np.float32),
      starts=np.array(starts, np.int64),
      bytes_=np.concatenate([[0], np.cumsum(lengths)]),
      text=np.frombuffer(b''.join(spelled), np.uint8),
      names=list(documents.names),
      about={'document_bytes': int(documents.bytes_.sum())},
    )

  @property
  def parts(self) -> list[np.ndarray]:
    """The losses of each document in nats, as views of `nats`."""
    return np.split(self.nats, self.starts[1:-1])

  @property
  def bits_per_byte(self) -> float:
    """Bits per byte of the documents, or of `text` if their size is unknown."""
    bits = self.nats.sum(dtype=np.float64) / np.log(2)
    return bits / (self.about.get('document_bytes') or len(self.text))

  def document_of(self, token):
    """Returns the index of the document that contains a token.

    Args:
      token: index of a token in `tokens`, or an array of indices. The result
        has the same shape.
    """
    return np.searchsorted(self.starts, token, 'right') - 1

  def write(self, path: str | Path) -> None:
    """Writes the losses to a file, completely or not at all.

    Raises:
      ValueError: the file cannot be written.
    """
    arrays = {
      'tokens': self.tokens,
      'nats': self.nats,
      'starts': self.starts,
      'bytes': self.bytes_,
      'text': self.text,
    }
    facts = {'names': self.names, 'about': self.about}
    array_file.write(path, _KIND, arrays, facts)

  @classmethod
  def load(cls, path: str | Path) -> 'TokenLosses':
    """Reads the losses from a file that `write` wrote.

    Raises:
      ValueError: the file is missing, damaged or of another kind.
    """
    arrays, facts = array_file.read(path, _KIND, _COMMAND)
    try:
      losses = cls(
        tokens=arrays['tokens'],
        nats=arrays['nats'],
        starts=arrays['starts'],
        bytes_=arrays['bytes'],
        text=arrays['text'],
        names=list(facts['names']),
        about=dict(facts['about']),
      )
    except (KeyError, TypeError, ValueError):
      raise array_file.damaged(path, _KIND, _COMMAND) from None
    if not losses.is_sound():
      raise array_file.damaged(path, _KIND, _COMMAND)
    return losses

  def is_sound(self) -> bool:
    """Returns whether the arrays are as the docstring of the class says."""
    arrays = self.tokens, self.nats, self.starts, self.bytes_, self.text
    kinds = [(a.ndim, a.dtype) for a in arrays] == [
      (1, dtype) for dtype in _DTYPES.values()
    ]
    N = len(self.tokens)
    return (
      kinds
      and len(self.nats) == N
      and len(self.bytes_) == N + 1
      and len(self.starts) == len(self.names) + 1
      and _rises(self.starts, N)
      and _rises(self.bytes_, len(self.text))
      and isinstance(self.about.get('document_bytes', 0), int)
    )


def _rises(a: np.ndarray, end: int) -> bool:
  """Returns whether an array begins with 0, never falls and ends with `end`."""
  return bool((a[0], a[-1]) == (0, end) and (np.diff(a) >= 0).all())
