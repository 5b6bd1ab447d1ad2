"""Distance from each name in a text back to its previous use.

A name is a run of at least three letters, digits or underscores, of any script,
that does not begin with a digit. Attention can help to predict a name only if
it was used within the reach of attention. A recurrent state can help with older
names too.
"""

from collections.abc import Iterator
import dataclasses
import re

import numpy as np

from meliad_rec.evaluation.token_losses import TokenLosses

_INVALID = 'surrogateescape'  # Decodes a byte that is not UTF-8 as a character.
_NAME = re.compile(r'[^\W\d]\w{2,}')


@dataclasses.dataclass(frozen=True)
class Names:
  """The N names of some documents, in order.

  Attributes:
    first: int64 [N], index of the first token of each name.
    end: int64 [N], index of the first token after each name.
    distance: int64 [N], number of tokens from the beginning of the same name's
      previous use in the document to its beginning here; 0 at its first use.
  """

  first: np.ndarray
  end: np.ndarray
  distance: np.ndarray

  @classmethod
  def of(cls, losses: TokenLosses) -> 'Names':
    """Returns the names in a text.

    A token that is partly in a name belongs to the name.
    """
    spans, distances = [], []
    bounds = losses.bytes_[losses.starts]
    for begin, end in zip(bounds, bounds[1:], strict=False):
      text = losses.text[begin:end].tobytes().decode('utf-8', _INVALID)
      found, used = list(_NAME.finditer(text)), {}
      spans_N2 = np.array([m.span() for m in found], np.int64).reshape(-1, 2)
      at = begin + byte_offsets(text)[spans_N2]
      first_N = np.searchsorted(losses.bytes_, at[:, 0], 'right') - 1
      end_N = np.searchsorted(losses.bytes_, at[:, 1], 'left')
      spans.append(np.stack([first_N, end_N]))
      for name, first in zip(found, first_N.tolist(), strict=True):
        distances.append(first - used.get(name[0], first))
        used[name[0]] = first
    spans = np.concatenate(spans, 1) if spans else np.zeros((2, 0), np.int64)
    return cls(*spans, np.array(distances, np.int64))

  def nats(self, losses: TokenLosses) -> np.ndarray:
    """Returns the loss of each name in nats, the sum over its tokens: [N]."""
    return self.sums(losses.nats)

  def sums(self, values_T: np.ndarray) -> np.ndarray:
    """Returns the sum over the tokens of each name: [N]."""
    total = np.concatenate([[0], np.cumsum(values_T, dtype=np.float64)])
    return total[self.end] - total[self.first]

  def bins(self) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields bins of names by distance.

    The bins are [0, 1) for first uses, [1, 16), [16, 32), [32, 64), and so on.

    Yields:
      The lowest distance of the bin, its end (not in the bin), and the indices
      of its names.
    """
    low, high = 0, 1
    while low <= self.distance.max(initial=0):
      inside = (self.distance >= low) & (self.distance < high)
      yield low, high, np.flatnonzero(inside)
      low, high = high, max(16, 2 * high)


def bin_label(low: int, high: int) -> str:
  """Returns what a figure or table calls a bin of Names.bins."""
  return f'{low:,}-{high - 1:,}' if low else 'first use'


def byte_offsets(text: str) -> np.ndarray:
  """Returns where each character of a text begins in UTF-8, and its end."""
  code_N = np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), np.uint32)
  bytes_N = 1 + (code_N >= 0x80) + (code_N >= 0x800) + (code_N >= 0x10000)
  bytes_N[(code_N >= 0xDC80) & (code_N <= 0xDCFF)] = 1  # Of _INVALID.
  return np.concatenate([[0], np.cumsum(bytes_N)])
