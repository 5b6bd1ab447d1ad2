"""Comparison of two models on the same tokens.

As in Hutchins et al. 2022, section 4.6, the tokens are sorted by how much
better the second model predicts them. The tokens at both ends of this order are
shown in context, with the distance back to the previous use of the same name:
attention reaches it only if it is near enough.
"""

from collections.abc import Iterator
import math

import numpy as np

from meliad_rec.evaluation.name_distance import bin_label
from meliad_rec.evaluation.name_distance import Names
from meliad_rec.evaluation.token_losses import TokenLosses
from meliad_rec.report.console import dots
from meliad_rec.report.console import printable

_BEFORE, _AFTER = 90, 20  # Bytes of text shown around a token.


def compare(
  a: TokenLosses,
  b: TokenLosses,
  top: int,
  unit: str,
  by_document: bool = False,
) -> str:
  """Returns tables, as text, of how many bits model B gains over model A.

  Control characters in the texts are replaced, since they could change the
  terminal.

  Args:
    a, b: losses of models A and B on the same tokens.
    top: maximum number of units to show where B gains most, and maximum number
      of units to show where B loses most.
    unit: 'token', or 'word' for the words of `word_starts`.
    by_document: whether to show `top` units for each document, instead of
      `top` units in total.

  Raises:
    ValueError: the losses are of different tokens, or the unit is unknown.
  """
  if not (
    np.array_equal(a.tokens, b.tokens)
    and np.array_equal(a.starts, b.starts)
    and np.array_equal(a.text, b.text)
  ):
    raise ValueError(
      'The two files have losses of different tokens. Evaluate both runs on '
      'the same documents with the same vocabulary.'
    )
  match unit:
    case 'token':
      firsts = np.arange(len(a.tokens))
    case 'word':
      firsts = word_starts(a)
    case _:
      raise ValueError(f'unit must be token or word, got {unit!r}. Set --unit.')
  names = Names.of(a)
  places = a, b, names, firsts, top, by_document
  lines = [
    *_totals(a, b),
    '',
    'By position in the document:',
    *_by_place(a, b),
    '',
    'Names, by the number of tokens back to their previous use:',
    *_by_distance(a, b, names),
    *_places('gained', 1, *places),
    *_places('lost', -1, *places),
  ]
  return printable('\n'.join(lines))


def word_starts(losses: TokenLosses) -> np.ndarray:
  """Returns the indices of the tokens in which words begin.

  Words are separated by whitespace, and a word includes the whitespace before
  it. A word always begins in the first token of a document.
  """
  text = losses.text
  is_space = np.isin(text, np.frombuffer(b' \t\n\r\f\v', np.uint8))
  # A word begins with the space after the last letter of the previous word.
  begins = is_space & ~np.concatenate([[True], is_space[:-1]])
  holds = np.concatenate([[0], np.cumsum(begins)])[losses.bytes_]
  first = np.diff(holds) > 0
  first[losses.starts[:-1][np.diff(losses.starts) > 0]] = True
  return np.flatnonzero(first)


def place_bins(losses: TokenLosses) -> Iterator[tuple[int, int, np.ndarray]]:
  """Yields bins of tokens by their positions in their documents.

  The bins are [0, 64), [64, 128), [128, 256), and so on.

  Yields:
    The first position of the bin, its end (not in the bin), and the indices of
    its tokens in `losses.tokens`.
  """
  place = np.arange(len(losses.tokens))
  place = place - losses.starts[losses.document_of(place)]
  low, high = 0, 64
  while low <= place.max(initial=0):
    inside = np.flatnonzero((place >= low) & (place < high))
    yield low, high, inside
    low, high = high, 2 * high


def _totals(a, b):
  yield f'{"":24}{"bits/token":>12}{"bits/byte":>12}'
  tokens = len(a.tokens)
  for name, one in ((f'A {_name(a)}', a), (f'B {_name(b)}', b)):
    bits = _bits(one.nats.sum(dtype=np.float64))
    yield f'{name:24}{bits / tokens:12.4f}{one.bits_per_byte:12.4f}'
  gain = (a.nats > b.nats).mean()
  lost = (a.nats < b.nats).mean()
  yield (
    f'{tokens:,} tokens: B is better at {gain:.1%}, A at {lost:.1%} of them.'
  )
  shares = 1, 5, 25, 50, 75, 95, 99
  gains = np.percentile(_bits(a.nats - b.nats), shares)
  row = ''.join(f'{share:8}' for share in shares)
  yield f'{"At this % of tokens,":24}{row}'
  row = ''.join(f'{gain:8.2f}' for gain in gains)
  yield f'{"B gains at most":24}{row} bits'


def _by_place(a, b):
  spans = [(f'{low:,}-{high - 1:,}', i) for low, high, i in place_bins(a)]
  return _table('token', spans, a.nats, b.nats)


def _by_distance(a, b, names):
  spans = []
  for low, high, inside in names.bins():
    if len(inside):
      spans.append((bin_label(low, high), inside))
  return _table('name', spans, names.nats(a), names.nats(b))


def _table(unit, spans, nats_a, nats_b):
  yield f'{"tokens":>20}{"count":>12}{"A":>9}{"B":>9}{"B gains":>9} bits/{unit}'
  for span, inside in spans:
    bits_a, bits_b = (_bits(nats[inside].mean()) for nats in (nats_a, nats_b))
    yield (
      f'{span:>20}{len(inside):12,}{bits_a:9.4f}{bits_b:9.4f}'
      f'{bits_a - bits_b:9.4f}'
    )


def _places(word, sign, a, b, names, firsts, top, by_document):
  """Yields lines that show, in context, where B gains or loses most.

  Args:
    word: 'gained' or 'lost', for the heading.
    sign: 1 for units at which B gains, -1 for units at which it loses.
    a, b: losses of models A and B.
    names: names of the text.
    firsts: index of the first token of each unit. A unit is a token or a word.
    top: maximum number of units to show.
    by_document: whether to show so many units of each document.
  """
  nats_a, nats_b = (
    np.add.reduceat(x.nats.astype(np.float64), firsts) for x in (a, b)
  )
  gain = sign * (nats_a - nats_b)
  gain_of_names = sign * (names.nats(a) - names.nats(b))
  best = np.argsort(-gain, kind='stable')
  best = best[gain[best] > 0]
  if by_document:
    document = a.document_of(firsts[best])
    at = np.argsort(document, kind='stable')
    best, document = best[at], document[at]
    place = np.arange(len(best)) - np.searchsorted(document, document)
    best = best[place < top]
  else:
    best = best[:top]
  relation = '>' if sign > 0 else '<'
  if len(best):
    yield (
      f'\nWhere B {word} most (bits of A {relation} bits of B, tokens back to '
      'the previous use of the name, document:byte, text):'
    )
  for i in best:
    first = firsts[i]
    end = firsts[i + 1] if i + 1 < len(firsts) else len(a.tokens)
    document = a.document_of(first)
    begin = a.bytes_[a.starts[document]]
    low, high = a.bytes_[first], a.bytes_[end]
    last = a.bytes_[a.starts[document + 1]]
    before = _shown(a.text[max(begin, low - _BEFORE) : low])
    there = _shown(a.text[low:high])
    after = _shown(a.text[high : min(last, high + _AFTER)])
    back = _distance(names, gain_of_names, first, end)
    yield (
      f'{_bits(nats_a[i]):7.2f} {relation} {_bits(nats_b[i]):5.2f} {back:>9}  '
      f'{a.names[document]}:{low - begin}  {before}[{there}]{after}'
    )


def _distance(names, gain_N, first, end):
  """Returns the distance of the name in a unit, as text; '-' without a name.

  If the unit has several names, the one with the highest gain counts.
  """
  begin = np.searchsorted(names.end, first, 'right')
  after = np.searchsorted(names.first, end, 'left')
  if begin >= after:
    return '-'
  distance = names.distance[begin + np.argmax(gain_N[begin:after])]
  return f'{distance:,}' if distance else 'first use'


def _shown(text: np.ndarray) -> str:
  """Returns UTF-8 bytes as one line of printable text."""
  line = text.tobytes().decode('utf-8', 'replace')
  return dots(line.replace('\n', '\u23ce'))


def _bits(nats):
  return nats / math.log(2)


def _name(losses):
  return f'{losses.about.get("run", "?")}:{losses.about.get("step", "?")}'
