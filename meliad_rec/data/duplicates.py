"""Near-duplicates: documents that share most of their text."""

from collections.abc import Iterable
import hashlib

import numpy as np

_FACTOR = 0x9E3779B97F4A7C15  # Odd, with random bits.
_MODULUS = 2**64
# One of 2**_RARITY shingles is in a sketch. A shingle has 32 bytes.
_RARITY = 5
_LENGTHS = 1, 2, 4, 8, 16


def sketch(text: str) -> np.ndarray:
  """Returns hashes of a sample of the shingles of a text: uint64, ascending.

  A shingle is 32 successive bytes of the text without its whitespace. The hash
  of a shingle decides whether it is in the sample, so texts that share a
  shingle both have it in their samples, or neither has (Broder 1997, "mod m").
  If the sample is empty, as it often is for less than 100 bytes, it is replaced
  by a hash of the whole text, so that copies are found.
  """
  content = ''.join(text.split()).encode(errors='surrogateescape')
  hashes = np.frombuffer(content, np.uint8).astype(np.uint64) + np.uint64(1)
  factor = _FACTOR
  for length in _LENGTHS:
    # Shingles of twice the length: a polynomial in `_FACTOR`.
    hashes = hashes[:-length] * np.uint64(factor) + hashes[length:]
    factor = factor * factor % _MODULUS
  hashes = (hashes ^ (hashes >> np.uint64(32))) * np.uint64(_FACTOR)
  sample = np.unique(hashes[hashes >> np.uint64(64 - _RARITY) == 0])
  if len(sample):
    return sample
  whole = hashlib.blake2b(content, digest_size=8).digest()
  return np.frombuffer(whole, np.uint64)


class Sketches:
  """Sketches of documents, among which those of similar texts are found.

  Args:
    sketches: the sketches.
  """

  def __init__(self, sketches: Iterable[np.ndarray]):
    found = [np.zeros(0, np.uint64), *sketches]
    self._sizes = np.array([len(each) for each in found])
    owners = np.repeat(np.arange(len(found)), self._sizes)
    hashes = np.concatenate(found)
    order = np.argsort(hashes, kind='stable')
    self._hashes, self._owners = hashes[order], owners[order]

  def similarity(self, sketch: np.ndarray) -> float:
    """Returns the greatest similarity of a text to any of the documents.

    The similarity is the number of shingles that both have, divided by the
    number that at least one has, estimated from the sketches: 0 to 1.
    """
    begins = np.searchsorted(self._hashes, sketch, 'left')
    ends = np.searchsorted(self._hashes, sketch, 'right')
    spans = [
      self._owners[begin:end]
      for begin, end in zip(begins, ends, strict=True)
      if begin < end
    ]
    if not spans:
      return 0.0
    shared = np.bincount(np.concatenate(spans), minlength=len(self._sizes))
    return float((shared / (len(sketch) + self._sizes - shared)).max())
