"""Vocabularies: text to token ids and back, without TensorFlow.

Id 0 is padding in every vocabulary and never occurs in a document.
"""

from collections.abc import Sequence
import hashlib
from pathlib import Path
from typing import Protocol

from etils import epath
import numpy as np
import sentencepiece

# Prefix of the identities of `Words` vocabularies, and of no others.
WORDS_PREFIX = 'words: '


class Vocabulary(Protocol):
  """The interface of a vocabulary.

  Attributes:
    size: number of ids, including padding and other special ids.
    identity: text that identifies the exact mapping from text to ids, equal on
      every machine.
  """

  size: int
  identity: str

  def encode(self, text: str) -> np.ndarray:
    """Returns the int32 ids of a text, with nothing added at either end."""

  def decode(self, ids: np.ndarray) -> str:
    """Returns the text of ids that are the beginning of a document.

    Invalid UTF-8 becomes U+FFFD.
    """

  def token_bytes(self, ids: np.ndarray) -> list[bytes]:
    """Returns the UTF-8 bytes of each id; ids begin at a document's start."""


def open_vocabulary(name: str | Path) -> Vocabulary:
  """Opens the vocabulary 'bytes' or a SentencePiece .model file."""
  return Bytes() if name == 'bytes' else SentencePiece(name)


class Bytes:
  """UTF-8 bytes at ids 3 to 258, as in ByT5 (Xue et al. 2022) and seqio.

  Ids 0, 1 and 2 are padding, end and unknown, which have no text.
  """

  size = 259
  identity = 'bytes'

  def encode(self, text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + 3

  def decode(self, ids: np.ndarray) -> str:
    ids = np.asarray(ids)
    return (
      (ids[ids >= 3] - 3).astype(np.uint8).tobytes().decode('utf-8', 'replace')
    )

  def token_bytes(self, ids: np.ndarray) -> list[bytes]:
    return [bytes([i - 3]) if i >= 3 else b'' for i in np.asarray(ids).tolist()]


class SentencePiece:
  """A SentencePiece model file (Kudo and Richardson 2018).

  U+2581 is SentencePiece's own mark for a space and is read as a space. A model
  made by `meliad_rec.commands.train_vocab` preserves all other text exactly.

  Args:
    path: the .model file.

  Raises:
    ValueError: the file is not a SentencePiece model, or the model can map
      text to id 0.
  """

  def __init__(self, path: str | Path):
    self.path = str(path)
    try:
      self.model = epath.Path(path).read_bytes()
    except OSError as error:
      raise ValueError(
        f'The vocabulary file {path} cannot be read ({error.strerror}). '
        "Give 'bytes' or the path of a SentencePiece .model file."
      ) from None
    self.identity = f'sentencepiece:{hashlib.sha256(self.model).hexdigest()}'
    try:
      self._processor = sentencepiece.SentencePieceProcessor(
        model_proto=self.model
      )
    except (RuntimeError, ValueError):
      raise ValueError(
        f'The vocabulary file {path} is not a SentencePiece model. '
        'Make one with python -m meliad_rec train_vocab.'
      ) from None
    self.size = self._processor.get_piece_size()
    self._bytes = [self._piece_bytes(i) for i in range(self.size)]
    if self._emits_zero():
      raise ValueError(
        f'The SentencePiece model {path} can map text to id 0 '
        f'({self._processor.id_to_piece(0)!r}), which is padding here. '
        'Train one with python -m meliad_rec train_vocab or with pad_id=0.'
      )

  def encode(self, text: str) -> np.ndarray:
    return np.asarray(self._processor.encode(text), np.int32)

  def decode(self, ids: np.ndarray) -> str:
    return b''.join(self.token_bytes(ids)).decode('utf-8', 'replace')

  def token_bytes(self, ids: np.ndarray) -> list[bytes]:
    ids = np.asarray(ids).tolist()
    spelled = [self._bytes[i] for i in ids]
    head = 0
    while head < len(ids) and not spelled[head].strip(b' '):
      head += 1
    if head < len(ids) and not self._processor.is_byte(ids[head]):
      head += 1
    # A model with a dummy prefix drops spaces at the beginning of the text and
    # other models do not, so the decoder is asked how many it drops.
    surplus = sum(map(len, spelled[:head])) - len(
      self._processor.decode(ids[:head]).encode()
    )
    for i in range(head):
      dropped = min(surplus, len(spelled[i]))
      spelled[i] = spelled[i][dropped:]
      surplus -= dropped
    return spelled

  def _piece_bytes(self, i: int) -> bytes:
    piece = self._processor.id_to_piece(i)
    if self._processor.is_control(i):
      return b''
    if self._processor.is_byte(i):
      return bytes([int(piece[1:-1], 16)])
    if self._processor.is_unknown(i):
      return self._processor.decode([i]).encode()
    return piece.replace('\u2581', ' ').encode()

  def _emits_zero(self) -> bool:
    if self._processor.is_control(0):
      return False
    has_bytes = any(map(self._processor.is_byte, range(self.size)))
    # With byte pieces, no text is unknown.
    return not (self._processor.is_unknown(0) and has_bytes)


class Words:
  """Space-separated words of a synthetic task; ids count from 1 in their order.

  The identity lists the words, so it is enough to restore the vocabulary.

  Args:
    words: all words.

  Raises:
    ValueError: a word is empty, contains a space, or occurs twice.
  """

  def __init__(self, words: Sequence[str]):
    self.words = tuple(words)
    if ' '.join(words).split() != list(words):
      raise ValueError(
        f'A word of {self.words} is empty or contains a space. Give words '
        'without spaces.'
      )
    self.size = len(words) + 1
    self.identity = WORDS_PREFIX + ' '.join(words)
    self._id_of = {word: i for i, word in enumerate(words, 1)}
    if len(self._id_of) < len(words):
      raise ValueError(f'A word occurs twice in {self.words}. Give it once.')

  @classmethod
  def from_identity(cls, identity: str) -> 'Words':
    """Returns the vocabulary with this identity.

    Raises:
      ValueError: it is the identity of another kind of vocabulary.
    """
    if not identity.startswith(WORDS_PREFIX):
      raise ValueError(
        f'{identity!r} is not the identity of a vocabulary of words, which '
        f'begins with {WORDS_PREFIX!r}.'
      )
    return cls(identity.removeprefix(WORDS_PREFIX).split())

  def encode(self, text: str) -> np.ndarray:
    """Returns the int32 ids of the words of a text.

    Raises:
      ValueError: a word is not in the vocabulary.
    """
    words = text.split()
    unknown = [word for word in words if word not in self._id_of]
    if unknown:
      raise ValueError(
        f'The vocabulary has no word {unknown[0]!r}; its words are '
        f'{" ".join(self.words)}.'
      )
    return np.fromiter(map(self._id_of.get, words), np.int32, len(words))

  def decode(self, ids: np.ndarray) -> str:
    return b''.join(self.token_bytes(ids)).decode()

  def token_bytes(self, ids: np.ndarray) -> list[bytes]:
    """Returns the bytes of each word with the space before it."""
    spelled = [
      f' {self.words[i - 1]}'.encode() if i else b''
      for i in np.asarray(ids).tolist()
    ]
    first = next((n for n, word in enumerate(spelled) if word), None)
    if first is not None:
      spelled[first] = spelled[first][1:]
    return spelled
