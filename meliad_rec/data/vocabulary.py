"""Vocabularies, which turn text into token ids and back, without TensorFlow.

Id 0 is padding in every vocabulary and never occurs in a document.
"""

import array
import collections
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import hashlib
import json
from pathlib import Path
from typing import Protocol

from etils import epath
import numpy as np
import sentencepiece

from meliad_rec.data import token_spelling
from meliad_rec.storage.workdir import expand_home

# Files in which the folder of a store or run keeps a vocabulary.
MODEL = 'vocabulary.model'
TOKENIZER = 'tokenizer.json'
WORD_LIST = 'vocabulary.txt'

# Prefix of the identities of `Words` vocabularies, and of no others.
WORDS_PREFIX = 'words: '

# The words of a `WordList` for a newline, and for words that are not in it.
END_OF_LINE, UNKNOWN = '<eos>', '<unk>'


class Vocabulary(Protocol):
  """The interface of a vocabulary.

  Attributes:
    size: number of ids, including padding and other special ids.
    identity: string that identifies the exact mapping from text to ids; the
      same on every machine.
  """

  size: int
  identity: str

  def encode(self, text: str) -> np.ndarray:
    """Returns the int32 ids of a text, with nothing added at either end."""

  def decode(self, ids: np.ndarray) -> str:
    """Returns the text of the given ids.

    The ids must begin with the first id of a document, because a vocabulary may
    drop the space before the first word. Invalid UTF-8 becomes U+FFFD.
    """

  def token_bytes(self, ids: np.ndarray) -> list[bytes]:
    """Returns the UTF-8 bytes of each id.

    As in `decode`, the ids must begin with the first id of a document.
    """


def open_vocabulary(name: str | Path) -> Vocabulary:
  """Opens a vocabulary.

  Args:
    name: 'bytes', or the path of a SentencePiece .model file, of a Hugging Face
      tokenizer.json, or of a .txt file of words.

  Raises:
    ValueError: the file cannot be read, or is not such a file.
  """
  if name == 'bytes':
    return Bytes()
  kinds = {'.json': Tokenizer, '.txt': WordList.open}
  return kinds.get(Path(name).suffix, SentencePiece)(name)


def vocabulary_files(vocabulary: Vocabulary) -> Mapping[str, bytes]:
  """Returns {file name: content} of a vocabulary; {} if it needs no file."""
  match vocabulary:
    case SentencePiece():
      return {MODEL: vocabulary.model}
    case Tokenizer():
      return {TOKENIZER: vocabulary.model}
    case WordList():
      return {WORD_LIST: vocabulary.model}
  return {}


class Bytes:
  """UTF-8 bytes at ids 3 to 258, as in ByT5 (Xue et al. 2022) and seqio.

  Ids 0, 1 and 2 are padding, end and unknown, which have no text. Bytes that
  Python decoded with errors='surrogateescape' are encoded as they were.
  """

  size = 259
  identity = 'bytes'

  def encode(self, text: str) -> np.ndarray:
    content = text.encode(errors='surrogateescape')
    return np.frombuffer(content, np.uint8).astype(np.int32) + 3

  def decode(self, ids: np.ndarray) -> str:
    ids = np.asarray(ids)
    return (
      (ids[ids >= 3] - 3).astype(np.uint8).tobytes().decode('utf-8', 'replace')
    )

  def token_bytes(self, ids: np.ndarray) -> list[bytes]:
    return [bytes([i - 3]) if i >= 3 else b'' for i in np.asarray(ids).tolist()]


class SentencePiece:
  """A vocabulary from a SentencePiece model file (Kudo and Richardson 2018).

  SentencePiece marks spaces by the character U+2581, so this character in a
  text becomes a space. A model made by `meliad_rec.commands.train_vocab`
  preserves all other text exactly.

  A token has the id that the model gives it. If the model gives id 0, which is
  padding here, to a piece of text, all ids are one higher.

  Args:
    path: the .model file.

  Raises:
    ValueError: the file cannot be read or is not a SentencePiece model.
  """

  def __init__(self, path: str | Path):
    self.path = str(path)
    self.model = _read(path)
    self.identity = f'sentencepiece:{hashlib.sha256(self.model).hexdigest()}'
    try:
      self._processor = sentencepiece.SentencePieceProcessor(
        model_proto=self.model
      )
    except (RuntimeError, ValueError):
      raise ValueError(
        f'The vocabulary file {path} is not a SentencePiece model. '
        'Make one with meliad-rec train_vocab.'
      ) from None
    pieces = range(self._processor.get_piece_size())
    self._first = int(self._emits_zero())  # Our id of the model's id 0.
    if self._first:
      self.identity = f'ids plus 1 of {self.identity}'
    self.size = self._first + len(pieces)
    self._bytes = [b''] * self._first + [*map(self._piece_bytes, pieces)]
    # Whether a space is added at the beginning of a text.
    first = [self._bytes[i] for i in self.encode('a')[:1]]
    self.adds_space = b''.join(first).startswith(b' ')

  def encode(self, text: str) -> np.ndarray:
    return np.asarray(self._processor.encode(text), np.int32) + self._first

  def decode(self, ids: np.ndarray) -> str:
    return b''.join(self.token_bytes(ids)).decode('utf-8', 'replace')

  def token_bytes(self, ids: np.ndarray) -> list[bytes]:
    ids = np.asarray(ids).tolist()
    spelled = [self._bytes[i] for i in ids]
    head = 0
    while head < len(ids) and not spelled[head].strip(b' '):
      head += 1
    if head < len(ids) and not self._processor.is_byte(ids[head] - self._first):
      head += 1
    known = [i - self._first for i in ids[:head] if i >= self._first]
    # A model with a dummy prefix drops spaces at the beginning of the text and
    # other models do not, so the decoder is asked how many it drops.
    surplus = sum(map(len, spelled[:head])) - len(
      self._processor.decode(known).encode()
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
    pieces = range(self._processor.get_piece_size())
    has_bytes = any(map(self._processor.is_byte, pieces))
    # With byte pieces, no text is unknown.
    return not (self._processor.is_unknown(0) and has_bytes)


class Tokenizer:
  """A Hugging Face tokenizer, read from a file tokenizer.json.

  Ids are the file's ids plus 1, because 0 is padding. Text that looks like a
  special token, such as '<s>', is encoded like any other text, so no special
  token occurs in a document. If the tokenizer does not normalize text, decoding
  returns exactly the text that was encoded, with one exception: if the
  tokenizer adds a space at the beginning of a text, a space that was already
  there is lost.

  Args:
    path: the file. Its decoder must be ByteLevel (GPT-2, Llama 3), or one for
      SentencePiece: Metaspace, or Replace with ByteFallback (Llama 2).

  Raises:
    ValueError: the file cannot be read or is not a tokenizer with such a
      decoder, or the package `tokenizers` is not installed. `encode` raises it
      if the tokenizer would drop a byte of a text.
  """

  def __init__(self, path: str | Path):
    try:
      import tokenizers
    except ImportError:
      raise ValueError(
        f'{path} needs the package tokenizers. Install meliad_rec[hf].'
      ) from None
    self.path = str(path)
    self.model = _read(path)
    self.identity = f'tokenizer:{hashlib.sha256(self.model).hexdigest()}'
    try:
      settings = json.loads(self.model)
      self._tokenizer = tokenizers.Tokenizer.from_buffer(self.model)
      decoders = token_spelling.decoders(settings['decoder'])
      unknown = settings['model'].get('unk_token')
    # The package raises Exception itself.
    except Exception:
      raise ValueError(
        f'The vocabulary file {path} is not a tokenizer of Hugging Face that '
        'this version of tokenizers reads. Save it again with '
        'tokenizer.save_pretrained.'
      ) from None
    if not decoders or not decoders <= token_spelling.KNOWN_DECODERS:
      raise ValueError(
        f'The tokenizer {path} has the decoder '
        f'{"+".join(sorted(decoders)) or None}, which cannot turn tokens into '
        'text one by one. Give one with the decoder ByteLevel, Metaspace or '
        'ByteFallback.'
      )
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    self._tokenizer.encode_special_tokens = True
    if getattr(self._tokenizer.model, 'dropout', None):
      self._tokenizer.model.dropout = None
    pieces = {i: piece for piece, i in self._tokenizer.get_vocab().items()}
    self.size = max(pieces) + 2
    added = {
      i: b'' if token.special else token.content.encode()
      for i, token in self._tokenizer.get_added_tokens_decoder().items()
    }
    is_byte_level = 'ByteLevel' in decoders
    kind = 'byte_level' if is_byte_level else 'sentencepiece'
    spell = getattr(token_spelling, kind)
    spelled = {i: spell(pieces[i]) for i in pieces if i not in added} | added
    if unknown is not None:
      spelled[self._tokenizer.token_to_id(unknown)] = '\ufffd'.encode()
    self._bytes = [spelled.get(i, b'') for i in range(-1, self.size - 1)]
    # Bytes of a text that the package would drop without a word.
    self._lost = set()
    # Whether a space is added at the beginning of a text.
    self.adds_space = False
    self.adds_space = self.decode(self.encode('a')) == ' a'
    if is_byte_level and unknown is None:
      single = {piece[0] for piece in self._bytes if len(piece) == 1}
      self._lost = {*range(256)} - single

  def encode(self, text: str) -> np.ndarray:
    content = text.encode()  # Half a character is an error here.
    if self._lost and (lost := self._lost.intersection(content)):
      raise ValueError(
        f'The tokenizer {self.path} has no token for the byte {min(lost)} of '
        'UTF-8 in a text. Train it with an initial alphabet of all bytes.'
      )
    ids = self._tokenizer.encode(text, add_special_tokens=False).ids
    return np.asarray(ids, np.int32) + 1

  def decode(self, ids: np.ndarray) -> str:
    return b''.join(self.token_bytes(ids)).decode('utf-8', 'replace')

  def token_bytes(self, ids: np.ndarray) -> list[bytes]:
    spelled = [self._bytes[i] for i in np.asarray(ids).tolist()]
    first = next((n for n, piece in enumerate(spelled) if piece), None)
    if self.adds_space and first is not None:
      spelled[first] = spelled[first].removeprefix(b' ')
    return spelled


class Words:
  """A vocabulary of the space-separated words of a synthetic task.

  The identity lists the words, so it is enough to restore the vocabulary.

  Args:
    words: all words in the order of their ids, which count from 1.

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
      ValueError: the identity belongs to another kind of vocabulary.
    """
    if not identity.startswith(WORDS_PREFIX):
      raise ValueError(
        f'The identity of a vocabulary of words must begin with '
        f'{WORDS_PREFIX!r}, got {identity!r}. Give the identity of a Words.'
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
        f'The vocabulary has no word {unknown[0]!r}. Use only '
        f'its words: {" ".join(self.words)}.'
      )
    return np.fromiter(map(self._id_of.get, words), np.int32, len(words))

  def decode(self, ids: np.ndarray) -> str:
    return b''.join(self.token_bytes(ids)).decode()

  def token_bytes(self, ids: np.ndarray) -> list[bytes]:
    """Returns the bytes of each id: a space and its word, or b'' for id 0.

    The first word has no space.
    """
    spelled = [
      f' {self.words[i - 1]}'.encode() if i else b''
      for i in np.asarray(ids).tolist()
    ]
    first = next((n for n, word in enumerate(spelled) if word), None)
    if first is not None:
      spelled[first] = spelled[first][1:]
    return spelled


class WordList:
  """A vocabulary of the words of a text; a newline is the word '<eos>'.

  Texts must be split into words by whitespace, as WikiText and the Penn
  Treebank are. Only words and newlines of a text are encoded. Other words
  become '<unk>'.

  Args:
    words: all words in the order of their ids, which count from 1. '<eos>' must
      be one of them. An adaptive embedding needs the most frequent word first.

  Raises:
    ValueError: a word is empty, has a space or is repeated, or there is no
      '<eos>'. `encode` raises it if a word is not in the vocabulary and '<unk>'
      is not either.
  """

  def __init__(self, words: Sequence[str]):
    self.model = ''.join(f'{word}\n' for word in words).encode()
    self.identity = f'word list:{hashlib.sha256(self.model).hexdigest()}'
    self._id_of = {word: i for i, word in enumerate(words, 1)}
    wrong = [word for word in words if word.split() != [word]]
    if wrong or len(self._id_of) < len(words) or END_OF_LINE not in self._id_of:
      raise ValueError(
        'A list of words must have each word once, without spaces, and '
        f'{END_OF_LINE}, got {len(words)} words'
        f'{f", one of them {wrong[0]!r}" if wrong else ""}. Write one word in '
        'each line of the file.'
      )
    self.size = len(words) + 1
    self._bytes = [b'', *(f' {word}'.encode() for word in words)]
    self._bytes[self._id_of[END_OF_LINE]] = b'\n'

  @classmethod
  def open(cls, path: str | Path) -> 'WordList':
    """Returns the vocabulary of a .txt file with one word in each line.

    Raises:
      ValueError: the file cannot be read, or its words are not valid.
    """
    try:
      # Without the byte order mark of some editors.
      content = _read(path).decode('utf-8-sig')
    except UnicodeDecodeError as error:
      raise ValueError(
        f'The words in {path} are not UTF-8 (byte {error.start}). Convert them.'
      ) from None
    return cls(content.removesuffix('\n').split('\n'))

  @classmethod
  def collect(cls, texts: Iterable[str]) -> 'WordList':
    """Returns the vocabulary of all words of texts, the most frequent first.

    Raises:
      ValueError: the texts have bytes that are not UTF-8.
    """
    counts = collections.Counter({END_OF_LINE: 0})
    for text in texts:
      lines = text.split('\n')
      counts[END_OF_LINE] += len(lines) - 1
      for line in lines:
        counts.update(line.split())
    words = [word for word, _ in counts.most_common()]
    try:
      return cls(words)
    except UnicodeEncodeError:
      raise ValueError(
        'The texts have bytes that are not UTF-8, such as half a character '
        'where a file was cut. Set --vocabulary=bytes (in gin: VOCABULARY = '
        "'bytes')."
      ) from None

  def encode(self, text: str) -> np.ndarray:
    end_of_line, unknown = map(self._id_of.get, (END_OF_LINE, UNKNOWN))
    ids = array.array('i')
    for number, line in enumerate(text.split('\n')):
      if number:
        ids.append(end_of_line)
      words = line.split()
      try:
        ids.extend([self._id_of.get(word, unknown) for word in words])
      except TypeError:
        missing = next(word for word in words if word not in self._id_of)
        raise ValueError(
          f'The vocabulary has neither the word {missing!r} nor {UNKNOWN}. '
          f'Put {UNKNOWN} in place of rare words of the training text, or add '
          'it to the list of words.'
        ) from None
    return np.frombuffer(ids, np.int32) if ids else np.zeros(0, np.int32)

  def decode(self, ids: np.ndarray) -> str:
    return b''.join(self.token_bytes(ids)).decode()

  def token_bytes(self, ids: np.ndarray) -> list[bytes]:
    """Returns the bytes of each id: a word after a space, or a newline.

    The first word of a line has no space.
    """
    spelled = [self._bytes[i] for i in np.asarray(ids).tolist()]
    before = b'\n'
    for i, word in enumerate(spelled):
      if before == b'\n':
        spelled[i] = word.removeprefix(b' ')
      before = word or before
    return spelled


def _read(path: str | Path) -> bytes:
  try:
    return epath.Path(expand_home(path)).read_bytes()
  except OSError as error:
    raise ValueError(
      f'The vocabulary file {path} cannot be read ({error.strerror}). Give '
      "'bytes', or the path of a SentencePiece .model file, of a "
      'tokenizer.json or of a .txt file of words.'
    ) from None
