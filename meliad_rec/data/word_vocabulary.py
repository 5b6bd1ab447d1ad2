"""A vocabulary of a few known words, such as those of a made-up language."""

from collections.abc import Sequence

import numpy as np

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
