"""Lanes: every batch row reads one document after another, segment by segment.

Rows take documents from one queue, in row order, each as soon as it has read
its last: which row reads what follows from the documents' lengths alone, so any
number of hosts sees the same batches. Documents begin only at segment borders;
the last segment of each is padded. Of pairs each sequence has half a segment.
Rows that share too few documents begin at unlike segments of them, unless these
have labels, which may depend on the beginning.

A row of a segment: what it holds of a document, or of a pair.

Which documents lanes take, and where in them: the same on every machine.

Short segments in the beginning of a run (Fan et al. 2020, section 4.1).

Gradients then reach less far back, and steps are cheaper.
"""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from meliad_rec.data.batch import Batch
from meliad_rec.data.documents import Documents
from meliad_rec.data.documents import side_lengths


class Row(NamedTuple):
  """Inputs, targets, and which places are of the document."""

  tokens_T: np.ndarray  # int32; 0 where padded.
  targets_T: np.ndarray  # int32; 0 where padded.
  mask_T: np.ndarray  # bool

  @classmethod
  def empty(cls, places: int) -> 'Row':
    """All padding."""
    ids_T = np.zeros(places, np.int32)
    return cls(ids_T, ids_T.copy(), np.zeros(places, bool))


def read(documents: Documents, i: int, at: int, places: int) -> Row:
  """The next places of document i, padded.

  Text is shifted by one token, and its first input is 0; labels are not. Of a
  pair, each sequence has half of the places, its padding behind it, and the
  label stands at the last place of the row in which both are at their end.

  Args:
    documents: what is read.
    i: which of them; none if below 0.
    at: tokens of the document, or of each sequence of a pair, read before.
    places: of the row; an even number for pairs.
  """
  row = Row.empty(places)
  if i < 0:
    return row
  begin, end = documents.starts[i : i + 2]
  if documents.middles is None:
    real = slice(min(places, end - begin - at))
    row.tokens_T[real], row.targets_T[real] = documents.read(i, at, real.stop)
    row.mask_T[real] = True
    return row
  half, edges = places // 2, (begin, begin + documents.middles[i], end)
  for side, (first, last) in enumerate(itertools.pairwise(edges)):
    tokens = documents.tokens[first:last][at : at + half]
    here = slice(side * half, side * half + len(tokens))
    row.tokens_T[here], row.mask_T[here] = tokens, True
  if np.diff(edges).max() <= at + half:
    row.targets_T[-1] = documents.labels[end - 1]
  return row


def shuffled(lengths: np.ndarray, seed: int, epoch: int) -> np.ndarray:
  """Documents that hold something, another order in each epoch."""
  full = np.flatnonzero(lengths)
  # numpy promises this raw stream for ever, but not that of permutation.
  bits = np.random.PCG64(np.random.SeedSequence((seed, epoch)))
  return full[np.argsort(bits.random_raw(len(full)), kind='stable')]


def as_they_lie(lengths: np.ndarray) -> np.ndarray:
  """Documents that hold something, as they are numbered."""
  return np.flatnonzero(lengths)


def longest_first(lengths: np.ndarray, segment: int) -> np.ndarray:
  """Documents that hold something, those of most segments first."""
  full = np.flatnonzero(lengths)
  segments = -(-lengths[full] // segment)
  return full[np.argsort(-segments, kind='stable')]


def apart(document_B: np.ndarray, segments_N: np.ndarray) -> np.ndarray:
  """Segments of its document, [B], that lie before the first each row reads.

  Of n rows that share a document, row j begins at j / n of it, as a stream is
  cut into rows; 0 where a row shares none.

  Args:
    document_B: each row's document.
    segments_N: segments of each document.
  """
  before_B = np.zeros_like(document_B)
  for i in np.unique(document_B):
    rows = np.flatnonzero(document_B == i)
    before_B[rows] = np.arange(len(rows)) * segments_N[i] // len(rows)
  return before_B


@dataclasses.dataclass(frozen=True)
class ShorterFirst:
  """The first steps of a run read shorter segments.

  Attributes:
    segment: tokens of a row in those steps.
    steps: how many there are.
  """

  segment: int
  steps: int

  def __post_init__(self):
    for name in ('segment', 'steps'):
      if getattr(self, name) < 1:
        raise ValueError(
          f'Shorter segments come first, with {name} = {getattr(self, name)}; '
          f'set FIRST_{name.upper()} to 1 or more.'
        )


Position = dict[str, int | bool | str | list[int]]


class Lanes:
  """Iterator of (Batch, position); position is where the next batch starts.

  Args:
    documents: what is read; empty documents are left out.
    rows: documents read side by side, over all hosts.
    segment: tokens of each row in a batch.
    seed: of the order of documents; each epoch has its own.
    shorter_first: what `segment` is in the first batches; None: no less.
    shuffle: False reads them as they lie, or longest first where repeat is
      False, so that rows end together.
    repeat: False ends after every token was a target once; rows that have run
      out are fully masked, with document -1.
    local_rows: the rows this host reads, [n]; None: all.

  Raises:
    ValueError: nothing to read, rows or segment below 1, or of pairs odd.
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
      raise ValueError(f'Lanes of {rows} rows and {segment} tokens hold none.')
    self.documents = documents
    self.local_rows = np.arange(rows) if local_rows is None else local_rows
    if not documents.lengths.any():
      raise ValueError(
        f'Nothing to read: all of the {len(documents)} documents are empty; '
        'choose another split or source.'
      )
    first = shorter_first.segment if shorter_first else segment
    if documents.middles is not None and (segment % 2 or first % 2):
      raise ValueError(
        f'Pairs share segments evenly, and these have {first} and {segment} '
        'tokens; set SEGMENT, and FIRST_SEGMENT, to even numbers.'
      )
    self._sides = side_lengths(documents.middles, documents.lengths)
    self._settings = {
      'rows': rows,
      'segment': segment,
      'shorter_first': shorter_first and dataclasses.asdict(shorter_first),
      'seed': seed,
      'shuffle': shuffle,
      'repeat': repeat,
    }
    self._shorter_first = shorter_first
    self._order = self._order_of(0)
    self._step = self._epoch = self._next = self._tokens = self._padding = 0
    self._document_B = np.full(rows, -1, np.int64)
    self._offset_B = np.zeros(rows, np.int64)

  @property
  def segment(self) -> int:
    """Tokens of each row in the next batch."""
    first = self._shorter_first
    early = first and self._step < first.steps
    return first.segment if early else self._settings['segment']

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
    """Where the next batch starts: small, and JSON as it is.

    `tokens` and `padding` count real and padded places of all rows since the
    beginning, `step` batches, `epoch` the pass that documents are taken from.
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
    """Goes exactly to a position that lanes of the same settings gave.

    Raises:
      ValueError: the position is of other documents or settings, or is none.
    """
    mine = self.position
    if set(position) != set(mine):
      raise ValueError(
        'This is no data position: it lacks or adds '
        f'{", ".join(sorted(set(position) ^ set(mine)))}; '
        'restore one that this version saved.'
      )
    for name in (*self._settings, 'documents'):
      if position[name] != mine[name]:
        raise ValueError(
          f'The data position was saved with {name} = {position[name]}, but '
          f'this run reads with {name} = {mine[name]}; '
          f'set {name} as it was, or start a new run.'
        )
    for name in 'step', 'epoch', 'next', 'tokens', 'padding':
      setattr(self, f'_{name}', position[name])
    self._order = self._order_of(self._epoch)
    self._document_B = np.asarray(position['document_B'], np.int64)
    self._offset_B = np.asarray(position['offset_B'], np.int64)

  def _take_documents(self) -> None:
    for row in np.flatnonzero(self._document_B < 0):
      if self._next == len(self._order):
        if not self._settings['repeat']:
          return
        self._epoch, self._next = self._epoch + 1, 0
        self._order = self._order_of(self._epoch)
      self._document_B[row] = self._order[self._next]
      self._next += 1
    if not self._step and self._epoch and self.documents.labels is None:
      segments_N = -(-self._sides.max(1) // self.segment)
      self._offset_B = self.segment * apart(self._document_B, segments_N)

  def _batch(self) -> Batch:
    document_B = self._document_B[self.local_rows]
    offset_B = np.where(document_B < 0, 0, self._offset_B[self.local_rows])
    at = zip(document_B, offset_B, strict=True)
    found = [read(self.documents, i, offset, self.segment) for i, offset in at]
    tokens_BT, targets_BT, mask_BT = map(np.stack, zip(*found, strict=True))
    labelled = self.documents.labels is not None
    return Batch(
      tokens_BT=tokens_BT,
      targets_BT=targets_BT,
      mask_BT=mask_BT,
      scored_BT=targets_BT != 0 if labelled else mask_BT,
      start_B=(document_B >= 0) & ((offset_B == 0) | (self._step == 0)),
      document_B=document_B.astype(np.int32),
      offset_B=offset_B.astype(np.int32),
    )

  def _advance(self) -> None:
    read_B1 = self._document_B[:, None] >= 0
    left_BN = self._sides[self._document_B] - self._offset_B[:, None]
    left_BN = np.where(read_B1, left_BN, 0)
    places = self.segment // left_BN.shape[1]  # Of each sequence.
    real = int(np.clip(left_BN, 0, places).sum())
    self._tokens += real
    self._padding += places * left_BN.size - real
    self._step += 1
    done_B = left_BN.max(1) <= places
    self._document_B = np.where(done_B, -1, self._document_B)
    self._offset_B = np.where(done_B, 0, self._offset_B + places)

  def _order_of(self, epoch: int) -> np.ndarray:
    settings, lengths = self._settings, self._sides.max(1)
    if settings['shuffle']:
      return shuffled(lengths, settings['seed'], epoch)
    if settings['repeat']:
      return as_they_lie(lengths)
    places = settings['segment'] // self._sides.shape[1]
    return longest_first(lengths, places)
