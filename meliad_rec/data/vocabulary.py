"""Vocabularies: text to token ids and back, without TensorFlow.

Id 0 is padding in every vocabulary and never occurs in a document.

A vocabulary of a few known words, such as those of a made-up language.
"""

from collections.abc import Sequence
import hashlib
from pathlib import Path
from typing import Protocol

from etils import epath
import numpy as np
import sentencepiece


class Vocabulary(Protocol):
  """What every vocabulary offers.

  Attributes:
    size: number of ids, padding and other special ones included.
    identity: names the exact map of text to ids, the same on every machine.
  """

  size: int
  identity: str

  def encode(self, text: str) -> np.ndarray:
    """int32 [tokens] ids of the text; nothing is added at either end."""

  def decode(self, ids: np.ndarray) -> str:
    """The text of ids that begin a document; broken UTF-8 becomes U+FFFD."""

  def token_bytes(self, ids: np.ndarray) -> list[bytes]:
    """The UTF-8 bytes each id stands for; ids begin a document."""


class Bytes:
  """UTF-8 bytes at ids 3 to 258, as in ByT5 (Xue et al. 2022) and seqio.

  Ids 0, 1 and 2 are padding, end and unknown: special, they stand for no text.
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

  U+2581 is SentencePiece's own mark for a space and is read as one; a model
  made by `meliad_rec.commands.train_vocab` keeps every other text exactly.

  Args:
    path: the .model file.

  Raises:
    ValueError: the file is no SentencePiece model, or it can give id 0 to text.
  """

  def __init__(self, path: str | Path):
    self.path = str(path)
    try:
      self.model = epath.Path(path).read_bytes()
    except OSError as error:
      raise ValueError(
        f'The vocabulary file {path} cannot be read ({error.strerror}); '
        "give 'bytes' or the path of a SentencePiece .model file."
      ) from None
    self.identity = f'sentencepiece:{hashlib.sha256(self.model).hexdigest()}'
    try:
      self._pieces = sentencepiece.SentencePieceProcessor(
        model_proto=self.model
      )
    except (RuntimeError, ValueError):
      raise ValueError(
        f'The vocabulary file {path} is not a SentencePiece model; '
        'make one with python -m meliad_rec train_vocab.'
      ) from None
    self.size = self._pieces.get_piece_size()
    self._bytes = [self._piece_bytes(i) for i in range(self.size)]
    if self._emits_zero():
      raise ValueError(
        f'The SentencePiece model {path} can give id 0 '
        f'({self._pieces.id_to_piece(0)!r}) to text, but id 0 is padding here; '
        'train one with python -m meliad_rec train_vocab or with pad_id=0.'
      )

  def encode(self, text: str) -> np.ndarray:
    return np.asarray(self._pieces.encode(text), np.int32)

  def decode(self, ids: np.ndarray) -> str:
    return b''.join(self.token_bytes(ids)).decode('utf-8', 'replace')

  def token_bytes(self, ids: np.ndarray) -> list[bytes]:
    ids = np.asarray(ids).tolist()
    spelled = [self._bytes[i] for i in ids]
    head = 0
    while head < len(ids) and not spelled[head].strip(b' '):
      head += 1
    if head < len(ids) and not self._pieces.is_byte(ids[head]):
      head += 1
    # A model with a dummy prefix drops spaces that begin the text, others do
    # not: the decoder itself says how many.
    surplus = sum(map(len, spelled[:head])) - len(
      self._pieces.decode(ids[:head]).encode()
    )
    for place in range(head):
      dropped = min(surplus, len(spelled[place]))
      spelled[place] = spelled[place][dropped:]
      surplus -= dropped
    return spelled

  def _piece_bytes(self, i: int) -> bytes:
    piece = self._pieces.id_to_piece(i)
    if self._pieces.is_control(i):
      return b''
    if self._pieces.is_byte(i):
      return bytes([int(piece[1:-1], 16)])
    if self._pieces.is_unknown(i):
      return self._pieces.decode([i]).encode()
    return piece.replace('\u2581', ' ').encode()

  def _emits_zero(self) -> bool:
    spells_bytes = any(map(self._pieces.is_byte, range(self.size)))
    silent = self._pieces.is_unknown(0) and spells_bytes
    return not (self._pieces.is_control(0) or silent)


def open_vocabulary(name: str | Path) -> Vocabulary:
  """The vocabulary called 'bytes', or that of a SentencePiece .model file."""
  return Bytes() if name == 'bytes' else SentencePiece(name)


# Identities of vocabularies of words begin so, and of no other kind.
MARK = 'words: '


class Words:
  """Words between spaces, at ids from 1 in the order given.

  The identity spells them out, so that it is all that is needed to make the
  vocabulary again.

  Args:
    words: all of them.

  Raises:
    ValueError: one is empty, holds a space, or occurs twice.
  """

  def __init__(self, words: Sequence[str]):
    self.words = tuple(words)
    if ' '.join(words).split() != list(words):
      raise ValueError(
        f'{self.words} are not words between spaces; give words that are not '
        'empty and hold no space.'
      )
    self.size = len(words) + 1
    self.identity = MARK + ' '.join(words)
    self._id_of = {word: i for i, word in enumerate(words, 1)}
    if len(self._id_of) < len(words):
      raise ValueError(f'A word occurs twice in {self.words}; give each once.')

  @classmethod
  def named(cls, identity: str) -> 'Words':
    """The vocabulary of that identity.

    Raises:
      ValueError: it is that of another kind of vocabulary.
    """
    if not identity.startswith(MARK):
      raise ValueError(
        f'The vocabulary {identity!r} is not one of words; give an identity '
        f'that begins with {MARK!r}.'
      )
    return cls(identity.removeprefix(MARK).split())

  def encode(self, text: str) -> np.ndarray:
    """int32 [words] ids of the text; ValueError if a word is not known."""
    words = text.split()
    unknown = [word for word in words if word not in self._id_of]
    if unknown:
      raise ValueError(
        f'The text holds {unknown[0]!r}, and the vocabulary has only '
        f'{" ".join(self.words)}; write the text in these words.'
      )
    return np.fromiter(map(self._id_of.get, words), np.int32, len(words))

  def decode(self, ids: np.ndarray) -> str:
    return b''.join(self.token_bytes(ids)).decode()

  def token_bytes(self, ids: np.ndarray) -> list[bytes]:
    """The bytes each id stands for: its word, and the space before it."""
    spelled = [
      f' {self.words[i - 1]}'.encode() if i else b''
      for i in np.asarray(ids).tolist()
    ]
    first = next((n for n, word in enumerate(spelled) if word), None)
    if first is not None:
      spelled[first] = spelled[first][1:]
    return spelled
