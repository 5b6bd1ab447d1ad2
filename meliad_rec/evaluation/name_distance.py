"""Distance from each name in a text back to its previous use.

A name is a run of at least three letters, digits or underscores that does not
begin with a digit. Attention can help to predict a name only if it was used
within the reach of attention. A recurrent state can help with older names too.
"""

from collections.abc import Iterator
import dataclasses
import re

import numpy as np

from meliad_rec.evaluation.token_losses import TokenLosses

# Bytes from 0x80 on are parts of letters in UTF-8.
_NAME = re.compile(rb'[A-Za-z_\x80-\xff][0-9A-Za-z_\x80-\xff]{2,}')


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
      text, used = losses.text[begin:end].tobytes(), {}
      found = list(_NAME.finditer(text))
      at = begin + np.array([m.span() for m in found], np.int64).reshape(-1, 2)
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
    total = np.concatenate([[0], np.cumsum(losses.nats, dtype=np.float64)])
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
