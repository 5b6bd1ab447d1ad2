"""Reads and generates text: a decoder with the vocabulary of its model."""

import codecs
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import functools

import numpy as np

from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.generation.beam import BeamSearch
from meliad_rec.generation.decoder import Decoder
from meliad_rec.generation.decoder import DecoderState
from meliad_rec.generation.sampling import Sampler
from meliad_rec.report.console import Countdown


class TextGenerator:
  """Reader of text and generator of its continuation.

  Args:
    decoder: decoder of the model.
    vocabulary: vocabulary of the model.
  """

  def __init__(self, decoder: Decoder, vocabulary: Vocabulary):
    self.decoder = decoder
    self.vocabulary = vocabulary

  def read(self, text: str, state: DecoderState | None = None) -> DecoderState:
    """Returns the state after all rows have read a text.

    The cost depends on the length of this text, not on how long the text before
    it was.

    Args:
      text: text of any length.
      state: state after the preceding text. None means that the text begins a
        document, in one row.
    """
    encode = self.vocabulary.encode
    if state is not None and int(state.count):
      encode = functools.partial(encode_continuation, self.vocabulary)
    return self.read_ids(encode(text), state)

  def read_ids(
    self, ids_T: np.ndarray, state: DecoderState | None = None
  ) -> DecoderState:
    """Returns the state after all rows have read tokens; see `read`."""
    state = self.decoder.start(1) if state is None else state
    rows = len(state.recent_BN)
    countdown = Countdown(len(ids_T), 'tokens')
    with contextlib.closing(countdown):
      ids_BT = np.tile(ids_T, (rows, 1))
      return self.decoder.read(state, ids_BT, countdown.show)

  def write(
    self,
    state: DecoderState,
    tokens: int,
    sampler: Sampler,
    seed: int,
    until: str | None = None,
  ) -> Iterator[tuple[DecoderState, list[str]]]:
    """Yields (state, texts) for each chunk of generated tokens.

    The state is that after the chunk, and `texts` has the new text of each row.
    After the last chunk comes one more pair, with the last state and the result
    of StreamingDetokenizer.end for each row.

    Args:
      state: the state after the prompt.
      tokens: number of tokens to generate for each row.
      sampler: draws the tokens.
      seed: seed of the draws.
      until: a text that ends each row, which includes it; the last chunk is the
        one in which the last row ends. None: no row ends early.

    Raises:
      ValueError: `until` is not a text, or is empty.
    """
    check_until(until)
    rows = [
      StreamingDetokenizer(self.vocabulary, [i for i in row if i])
      for row in np.asarray(state.recent_BN).tolist()
    ]
    cuts = [_Cut(until) for _ in rows]
    end = state
    for end, ids_BT in self.decoder.generate(state, tokens, sampler, seed):
      each = zip(cuts, rows, ids_BT, strict=True)
      yield end, [cut(row.add(ids)) for cut, row, ids in each]
      if all(cut.done for cut in cuts):
        break
    yield end, [cut(row.end()) for cut, row in zip(cuts, rows, strict=True)]

  def search(
    self,
    state: DecoderState,
    tokens: int,
    beam: BeamSearch,
    until: str | None = None,
  ) -> list[str]:
    """Returns the best continuations of a text, the best first.

    There are at most `beam.beams`; fewer if fewer have ended.

    Args:
      state: the state after the prompt, of one row.
      tokens: greatest number of tokens of a continuation, at least 1.
      beam: settings of the search.
      until: text of the token that ends a continuation, which it includes.
        None: all have the greatest number of tokens.

    Raises:
      ValueError: `until` is not a single token.
    """
    end = self.end_token(until)
    found = self.decoder.search(state, tokens, beam, end)
    recent = [i for i in np.asarray(state.recent_BN)[0].tolist() if i]
    texts = []
    for ids_L in np.asarray(found.tokens_BKL)[0][
      np.isfinite(found.score_BK[0])
    ]:
      row = StreamingDetokenizer(self.vocabulary, recent)
      texts.append(row.add(ids_L[ids_L > 0]) + row.end())
    return texts

  def end_token(self, until: str | None) -> int | None:
    """Returns the id of the token that ends a search; None if `until` is None.

    Raises:
      ValueError: `until` is not a single token.
    """
    check_until(until)
    if until is None:
      return None
    ids_T = encode_continuation(self.vocabulary, until)
    # A word that the vocabulary lacks may be encoded as an unknown one.
    same = self.vocabulary.decode(ids_T).strip() == until.strip()
    if len(ids_T) != 1 or not same:
      raise ValueError(
        f'A search ends at a single token of the vocabulary, but {until!r} '
        'is not one. Give another text, or none.'
      )
    return int(ids_T[0])


def check_until(until: str | None) -> None:
  """Raises ValueError unless `until` is None or a UTF-8 text, not empty."""
  if until is None or (
    isinstance(until, str)
    and until
    and until == until.encode(errors='replace').decode()
  ):
    return
  raise ValueError(
    f'until must be a UTF-8 text that is not empty, got {until!r}. Give '
    'another, or none.'
  )


def encode_continuation(vocabulary: Vocabulary, text: str) -> np.ndarray:
  """Returns the ids of a text that continues another one.

  Some vocabularies add a space at the beginning of a text. Here they do not:
  the text is encoded after a character that has tokens of its own.
  """
  if getattr(vocabulary, 'adds_space', False):
    for before in 'a.1':
      ids_T, first_T = map(vocabulary.encode, (before + text, before))
      if np.array_equal(ids_T[: len(first_T)], first_T):
        return ids_T[len(first_T) :]
  return vocabulary.encode(text)


class _Cut:
  """Cuts off what follows the first `until` of a text that comes in pieces."""

  def __init__(self, until: str | None):
    self._until, self._tail, self.done = until, '', False

  def __call__(self, piece: str) -> str:
    """Returns the part of the next piece that is kept."""
    if self.done or self._until is None:
      return '' if self.done else piece
    text, before = self._tail + piece, len(self._tail)
    at = text.find(self._until)
    self.done = at >= 0
    # `until` may begin in one piece and end in another.
    self._tail = text[max(len(text) - len(self._until) + 1, 0) :]
    return text[before : at + len(self._until)] if self.done else piece


class StreamingDetokenizer:
  """Converter of the tokens of one document into text, piece by piece.

  A character whose bytes are spread over several tokens appears with the token
  that has its last byte.

  Args:
    vocabulary: vocabulary of the tokens.
    before: the tokens just before the first piece; empty at the beginning of a
      document.
  """

  def __init__(self, vocabulary: Vocabulary, before: Sequence[int] = ()):
    self._vocabulary = vocabulary
    self._bytes = codecs.getincrementaldecoder('utf-8')('replace')
    self._context = []
    self.add(before)

  def add(self, ids: Sequence[int]) -> str:
    """Returns the characters whose last bytes are in `ids`, the next tokens."""
    ids = np.asarray(ids, np.int64).tolist()
    both = self._context + ids
    spelled = self._vocabulary.token_bytes(np.asarray(both, np.int64))
    new = spelled[len(self._context) :]
    # A token's bytes may depend on whether only spaces precede it, so the
    # context goes back to the last token that is not just spaces.
    words = [i for i, piece in enumerate(spelled) if piece.strip(b' ')]
    self._context = both[words[-1] :] if words else both
    return self._bytes.decode(b''.join(new))

  def end(self) -> str:
    """Returns '\\ufffd' if the text ends within a character, otherwise ''."""
    return self._bytes.decode(b'', final=True)
