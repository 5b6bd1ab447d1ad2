"""Lanes: the batch rows, each of which reads documents one after another.

A row reads a document segment by segment; a segment is the tokens that a row
has in one batch.

When a row finishes its document, it takes the next one from a queue that all
rows share. Rows that finish in the same batch take their next documents in row
order. The assignment of documents to rows depends only on the order and lengths
of the documents, so the batches are the same for any number of hosts. A
document begins at the start of a segment, and its last segment is padded. Each
sequence of a pair gets half of the segment.

If documents are repeated and there are fewer of them than rows, several rows
read the same document and start at different segments of it. Documents with
labels are always read from the beginning, because a label may depend on all
tokens before it.
"""

from collections.abc import Sequence
import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from meliad_rec.data.batch import Batch
from meliad_rec.data.documents import Documents

# Remedies, by the entry of a saved position that differs in this run.
_REMEDIES = {
  'rows': 'Set BATCH to the saved value',
  'segment': 'Set SEGMENT to the saved value',
  'source_segment': 'Set SOURCE_SEGMENT to the saved value',
  'buckets': 'Set BUCKETS to the saved value',
  'seed': 'Set experiment.Experiment.seed to the saved value',
  'shorter_first': 'Set FIRST_SEGMENT and FIRST_STEPS to the saved values',
  'documents': 'Give the same data (these are its hashes)',
}
# The position of Lanes in the data, as JSON values.
Position = dict[str, int | bool | str | list[int]]


@dataclasses.dataclass(frozen=True)
class ShorterFirst:
  """Shorter segments in the first steps of a run (Fan et al. 2020, sec. 4.1).

  In these steps gradients reach less far back, and each step is cheaper.

  Attributes:
    segment: tokens per row in these first steps.
    steps: number of these first steps.

  Raises:
    ValueError: segment or steps is below 1.
  """

  segment: int
  steps: int

  def __post_init__(self):
    for name in ('segment', 'steps'):
      value = getattr(self, name)
      if value < 1:
        raise ValueError(
          f'ShorterFirst.{name} must be at least 1, got {value}. '
          f'Set FIRST_{name.upper()}.'
        )


class Lanes:
  """Iterator over batches; yields (Batch, position of the next batch).

  Args:
    documents: the documents to read; empty ones are skipped.
    rows: number of rows of a batch, over all hosts.
    segment: tokens per row in a batch.
    seed: seed of the order of documents; each epoch has a different order.
    shorter_first: overrides `segment` in the first batches. None means that all
      batches have `segment` tokens per row.
    shuffle: whether to shuffle documents. If not, they are read in the given
      order or, if repeat is False, longest first, so that all rows end at about
      the same time.
    repeat: whether to continue after one epoch. If not, iteration ends when
      every token has been read once; rows that have no document left are all
      padding and have document -1.
    local_rows: array of the indices of the rows that this host reads. None: all
      rows.

  Raises:
    ValueError: all documents are empty, rows or segment is below 1, or
      documents are pairs and a segment has an odd number of tokens.
  """

  def __init__(
    self,
    documents: Documents,
    rows: int,
    segment: int,
    *,
    seed: int,
    shorter_first: ShorterFirst | None = None,
    shuffle: bool = True,
    repeat: bool = True,
    local_rows: np.ndarray | None = None,
  ):
    if min(rows, segment) < 1:
      raise ValueError(
        f'rows and segment must be at least 1, got rows={rows}, '
        f'segment={segment}. Set BATCH and SEGMENT.'
      )
    self.documents = documents
    self.local_rows = np.arange(rows) if local_rows is None else local_rows
    if not documents.lengths.any():
      number = len(documents)
      which = (
        'the document is' if number == 1 else f'all {number} documents are'
      )
      raise ValueError(
        f'Nothing to read: {which} empty. Choose another split or source.'
      )
    first = shorter_first.segment if shorter_first else segment
    if documents.first_lengths is not None and (segment % 2 or first % 2):
      raise ValueError(
        'The two sequences of a pair need equal halves of a segment, but '
        f'segments have {first} and {segment} tokens. Set SEGMENT and '
        'FIRST_SEGMENT to even numbers.'
      )
    self._lengths = documents.sequence_lengths
    self._settings = {
      'rows': rows,
      'segment': segment,
      'shorter_first': shorter_first and dataclasses.asdict(shorter_first),
      'seed': seed,
      'shuffle': shuffle,
      'repeat': repeat,
    }
    self._shorter_first = shorter_first
    self._order = self._epoch_order(0)
    self._step = self._epoch = self._next = self._tokens = self._padding = 0
    self._document_B = np.full(rows, -1, np.int64)
    self._offset_B = np.zeros(rows, np.int64)

  @property
  def segment(self) -> int:
    """Tokens per row in the next batch."""
    first = self._shorter_first
    is_early = first and self._step < first.steps
    return first.segment if is_early else self._settings['segment']

  @property
  def segments(self) -> set[int]:
    """All numbers of tokens per row in the next batch and in later ones."""
    return {self.segment, self._settings['segment']}

  def __iter__(self) -> 'Lanes':
    return self

  def __next__(self) -> tuple[Batch, Position]:
    self._take_documents()
    if (self._document_B < 0).all():
      raise StopIteration
    batch = self._batch()
    self._advance()
    return batch, self.position

  @property
  def position(self) -> Position:
    """The position of the next batch in the data, as a small JSON object.

    `step` counts batches. `tokens` and `padding` count the tokens and the
    padding positions of all rows since the beginning. `epoch` is the current
    pass over the documents, counted from 0, and `next` is the number of
    documents that rows have taken in this pass. `document_B` and `offset_B` are
    those of Batch, for the rows of all hosts. `documents` is a hash of the
    documents, and all other entries are arguments of Lanes.
    """
    return {
      **self._settings,
      'documents': self.documents.identity,
      'step': self._step,
      'epoch': self._epoch,
      'next': self._next,
      'tokens': self._tokens,
      'padding': self._padding,
      'document_B': self._document_B.tolist(),
      'offset_B': self._offset_B.tolist(),
    }

  def seek(self, position: Position) -> None:
    """Continues exactly at a position saved by Lanes with the same settings.

    Raises:
      ValueError: `position` has the wrong keys, or was saved with other
        documents or settings.
    """
    check_position(position, self.position, (*self._settings, 'documents'))
    for name in 'step', 'epoch', 'next', 'tokens', 'padding':
      setattr(self, f'_{name}', position[name])
    self._order = self._epoch_order(self._epoch)
    self._document_B = np.asarray(position['document_B'], np.int64)
    self._offset_B = np.asarray(position['offset_B'], np.int64)

  def _take_documents(self) -> None:
    for row in np.flatnonzero(self._document_B < 0):
      if self._next == len(self._order):
        if not self._settings['repeat']:
          return
        self._epoch, self._next = self._epoch + 1, 0
        self._order = self._epoch_order(self._epoch)
      self._document_B[row] = self._order[self._next]
      self._next += 1
    # Rows share documents only if the first batch already repeats some.
    if not self._step and self._epoch and self.documents.labels is None:
      segments_N = -(-self._lengths.max(1) // self.segment)
      self._offset_B = self.segment * staggered(self._document_B, segments_N)

  def _batch(self) -> Batch:
    document_B = self._document_B[self.local_rows]
    offset_B = np.where(document_B < 0, 0, self._offset_B[self.local_rows])
    rows = [
      read_row(self.documents, i, offset, self.segment)
      for i, offset in zip(document_B, offset_B, strict=True)
    ]
    tokens_BT, targets_BT, mask_BT = map(np.stack, zip(*rows, strict=True))
    has_labels = self.documents.labels is not None
    return Batch(
      tokens_BT=tokens_BT,
      targets_BT=targets_BT,
      mask_BT=mask_BT,
      scored_BT=targets_BT != 0 if has_labels else mask_BT,
      start_B=(document_B >= 0) & ((offset_B == 0) | (self._step == 0)),
      document_B=document_B.astype(np.int32),
      offset_B=offset_B.astype(np.int32),
    )

  def _advance(self) -> None:
    # N sequences per row: 1, or 2 for pairs.
    reads_B1 = self._document_B[:, None] >= 0
    left_BN = self._lengths[self._document_B] - self._offset_B[:, None]
    left_BN = np.where(reads_B1, left_BN, 0)
    width = self.segment // left_BN.shape[1]
    tokens = int(np.clip(left_BN, 0, width).sum())
    self._tokens += tokens
    self._padding += width * left_BN.size - tokens
    self._step += 1
    done_B = left_BN.max(1) <= width
    self._document_B = np.where(done_B, -1, self._document_B)
    self._offset_B = np.where(done_B, 0, self._offset_B + width)

  def _epoch_order(self, epoch: int) -> np.ndarray:
    settings, lengths = self._settings, self._lengths.max(1)
    if settings['shuffle']:
      return shuffled(lengths, settings['seed'], epoch)
    if settings['repeat']:
      return np.flatnonzero(lengths)
    width = settings['segment'] // self._lengths.shape[1]
    return longest_first(lengths, width)


def check_position(
  position: Position, current: Position, settings: Sequence[str]
) -> None:
  """Raises ValueError if a saved position does not fit an iterator.

  Args:
    position: the saved position.
    current: a position of the iterator that is to continue there.
    settings: names of the entries that must be equal.
  """
  if set(position) != set(current):
    raise ValueError(
      'This is not a data position of this version: the keys '
      f'{", ".join(sorted(set(position) ^ set(current)))} are missing or '
      'unknown. Restore a checkpoint that this version saved.'
    )
  for name in settings:
    if position[name] != current[name]:
      raise ValueError(
        f'The data position was saved with {name} = {position[name]}, but '
        f'this run reads with {name} = {current[name]}. '
        f'{_REMEDIES.get(name, f"Set {name} to the saved value")}, or start '
        'a new run.'
      )


class LaneRow(NamedTuple):
  """One row of a batch; see `tokens_BT`, `targets_BT`, `mask_BT` of Batch."""

  tokens_T: np.ndarray  # int32; 0 at padding.
  targets_T: np.ndarray  # int32; 0 at positions without a target.
  mask_T: np.ndarray  # bool

  @classmethod
  def empty(cls, length: int) -> 'LaneRow':
    """Returns a row of `length` positions of padding."""
    ids_T = np.zeros(length, np.int32)
    return cls(ids_T, ids_T.copy(), np.zeros(length, bool))


def read_row(documents: Documents, i: int, offset: int, length: int) -> LaneRow:
  """Returns the next tokens of document i, padded; see Batch for the format.

  Args:
    documents: the documents to read.
    i: index of the document; if it is below 0, the row is all padding.
    offset: number of tokens already read of the document, or of each sequence
      of a pair.
    length: number of positions in the row; even for pairs.
  """
  row = LaneRow.empty(length)
  if i < 0:
    return row
  begin, end = documents.starts[i : i + 2]
  if documents.first_lengths is None:
    real = slice(min(length, end - begin - offset))
    row.tokens_T[real], row.targets_T[real] = documents.read(
      i, offset, real.stop
    )
    row.mask_T[real] = True
    return row
  half, edges = length // 2, (begin, begin + documents.first_lengths[i], end)
  for side, (first, last) in enumerate(itertools.pairwise(edges)):
    tokens = documents.tokens[first:last][offset : offset + half]
    real = slice(side * half, side * half + len(tokens))
    row.tokens_T[real], row.mask_T[real] = tokens, True
  if np.diff(edges).max() <= offset + half:
    row.targets_T[-1] = documents.labels[end - 1]
  return row


def shuffled(
  lengths: np.ndarray, seed: int, epoch: int, *purpose: int
) -> np.ndarray:
  """Returns the indices of documents that are not empty, shuffled.

  Each pair of seed and epoch gives another order, the same on every machine.

  Args:
    lengths: number of tokens of each document.
    seed: seed of the order.
    epoch: number of the pass over the documents.
    *purpose: a number, for a further order that is independent of this one.
  """
  full = np.flatnonzero(lengths)
  # NumPy guarantees that this raw stream never changes, but `permutation` may.
  bits = np.random.PCG64(np.random.SeedSequence((seed, epoch, *purpose)))
  return full[np.argsort(bits.random_raw(len(full)), kind='stable')]


def longest_first(lengths: np.ndarray, segment: int) -> np.ndarray:
  """Returns the indices of documents that are not empty, longest first.

  Lengths are rounded up to whole segments before they are compared. Documents
  with equally many segments keep their order.

  Args:
    lengths: number of tokens of each document; for pairs, of the longer
      sequence.
    segment: number of tokens in a segment; for pairs, of each sequence.
  """
  full = np.flatnonzero(lengths)
  segments = -(-lengths[full] // segment)
  return full[np.argsort(-segments, kind='stable')]


def staggered(document_B: np.ndarray, segments_N: np.ndarray) -> np.ndarray:
  """Returns the index of the segment at which each row starts, [B].

  If n rows share a document, row j of them (counted from 0) starts after j / n
  of its segments, rounded down, so that together they cover it. A row that
  shares its document with no other row starts at segment 0.

  Args:
    document_B: the index of each row's document.
    segments_N: the number of segments of each of N documents.
  """
  first_B = np.zeros_like(document_B)
  for i in np.unique(document_B):
    rows = np.flatnonzero(document_B == i)
    first_B[rows] = np.arange(len(rows)) * segments_N[i] // len(rows)
  return first_B
