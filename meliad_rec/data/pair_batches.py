"""Batches of pairs, each a source and its target, sorted by length.

Each row of a batch is one whole pair, so nothing is carried from one batch to
the next. With n buckets, a batch has rows of one of n lengths: the full length
or its half, quarter and so on, and as many times more rows. A pair goes into
the shortest bucket that holds both its sequences, so that there is less
padding. All batches have the same number of positions.
"""

import numpy as np

from meliad_rec.data.batch import Batch
from meliad_rec.data.documents import Documents
from meliad_rec.data.lanes import check_position
from meliad_rec.data.lanes import Position
from meliad_rec.data.lanes import shuffled


class PairBatches:
  """Iterator over batches; yields (Batch, position of the next batch).

  Args:
    documents: the pairs.
    rows: number of rows of a batch of the longest bucket, over all hosts.
    segment: tokens of a target in the longest bucket.
    source_segment: tokens of a source there. None: as many as the longest
      source has, rounded up to a multiple of 8.
    buckets: number of lengths.
    seed: seed of the order of pairs; each epoch has a different order.
    shuffle: whether to shuffle pairs and batches.
    repeat: whether to continue after one epoch.
    local_rows: indices of the rows of the longest bucket that this host reads;
      it reads as large a part of other buckets. None: all rows.

  Raises:
    ValueError: there are no pairs, or one is longer than the longest bucket.
  """

  def __init__(
    self,
    documents: Documents,
    rows: int,
    segment: int,
    *,
    source_segment: int | None = None,
    buckets: int = 1,
    seed: int,
    shuffle: bool = True,
    repeat: bool = True,
    local_rows: np.ndarray | None = None,
  ):
    if not len(documents):
      raise ValueError(
        'Nothing to read: there are no pairs. Choose another split or source.'
      )
    self.documents = documents
    self.local_rows = np.arange(rows) if local_rows is None else local_rows
    self._lengths_N2 = documents.sequence_lengths
    longest = self._lengths_N2.max(0).tolist()
    source_segment = source_segment or -(-longest[0] // 8) * 8
    for name, setting, size, limit in (
      ('source', 'SOURCE_SEGMENT', longest[0], source_segment),
      ('target', 'SEGMENT', longest[1], segment),
    ):
      if size > limit:
        raise ValueError(
          f'The longest {name} has {size} tokens with its end, but {setting} '
          f'is {limit}. Set {setting} to at least {size}, or MAX_TOKENS = '
          '%SEGMENT, which leaves out longer pairs of train.'
        )
    self._settings = {
      'rows': rows,
      'segment': segment,
      'source_segment': source_segment,
      'buckets': buckets,
      'seed': seed,
      'shuffle': shuffle,
      'repeat': repeat,
    }
    self._step = self._epoch = self._next = self._tokens = self._padding = 0
    self._batches = self._epoch_batches(0)

  @property
  def segments(self) -> set[int]:
    """All numbers of tokens of a target that batches may have."""
    buckets = self._settings['buckets']
    return {self._settings['segment'] // 2**i for i in range(buckets)}

  def __iter__(self) -> 'PairBatches':
    return self

  def __next__(self) -> tuple[Batch, Position]:
    if self._next == len(self._batches):
      if not self._settings['repeat']:
        raise StopIteration
      self._epoch, self._next = self._epoch + 1, 0
      self._batches = self._epoch_batches(self._epoch)
    times, document_B = self._batches[self._next]
    lengths_B = self._lengths_N2[document_B, 1]
    tokens = int(lengths_B[document_B >= 0].sum())
    segment = self._settings['segment'] // times
    self._tokens += tokens
    self._padding += len(document_B) * segment - tokens
    self._next, self._step = self._next + 1, self._step + 1
    return self._batch(times, document_B), self.position

  @property
  def position(self) -> Position:
    """The position of the next batch in the data, as a small JSON object.

    `step`, `tokens`, `padding`, `epoch` and `documents` are as in Lanes, where
    only tokens and padding of targets count. `next` is the number of batches of
    this epoch so far. All other entries are arguments of PairBatches.
    """
    return {
      **self._settings,
      'documents': self.documents.identity,
      'step': self._step,
      'epoch': self._epoch,
      'next': self._next,
      'tokens': self._tokens,
      'padding': self._padding,
    }

  def seek(self, position: Position) -> None:
    """Continues exactly at a position saved with the same settings.

    Raises:
      ValueError: `position` has the wrong keys, or was saved with other
        documents or settings.
    """
    check_position(position, self.position, (*self._settings, 'documents'))
    for name in 'step', 'epoch', 'next', 'tokens', 'padding':
      setattr(self, f'_{name}', position[name])
    self._batches = self._epoch_batches(self._epoch)

  def _epoch_batches(self, epoch: int) -> list[tuple[int, np.ndarray]]:
    """Returns (times, document_B) of each batch of an epoch.

    `times` is how many times shorter its rows are than the rows of the longest
    bucket.
    """
    settings = self._settings
    limits = np.array([settings['source_segment'], settings['segment']])
    lengths_N2 = self._lengths_N2
    ones = np.ones(len(lengths_N2), np.int64)
    order = np.arange(len(ones))
    if settings['shuffle']:
      order = shuffled(ones, settings['seed'], epoch)
    bucket_N = np.zeros(len(ones), np.int64)
    for i in range(1, settings['buckets']):
      bucket_N += (lengths_N2 <= limits // 2**i).all(1)
    batches = []
    for i in range(settings['buckets']):
      members, rows = order[bucket_N[order] == i], settings['rows'] * 2**i
      for begin in range(0, len(members), rows):
        document_B = np.full(rows, -1)
        part = members[begin : begin + rows]
        document_B[: len(part)] = part
        batches.append((2**i, document_B))
    if settings['shuffle']:
      places = shuffled(np.ones(len(batches)), settings['seed'], epoch, 1)
      batches = [batches[place] for place in places]
    return batches

  def _batch(self, times: int, document_B: np.ndarray) -> Batch:
    local = self.local_rows[:, None] * times + np.arange(times)
    document_B = document_B[local.ravel()]
    B, documents = len(document_B), self.documents
    source_BS, tokens_BT, targets_BT = (
      np.zeros((B, self._settings[name] // times), np.int32)
      for name in ('source_segment', 'segment', 'segment')
    )
    mask_BT = np.zeros(tokens_BT.shape, bool)
    for row in np.flatnonzero(document_B >= 0):
      ids = documents[document_B[row]]
      sources = self._lengths_N2[document_B[row], 0]
      target = ids[sources:]
      source_BS[row, :sources] = ids[:sources]
      targets_BT[row, : len(target)] = target
      tokens_BT[row, 1 : len(target)] = target[:-1]
      mask_BT[row, : len(target)] = True
    return Batch(
      tokens_BT=tokens_BT,
      targets_BT=targets_BT,
      mask_BT=mask_BT,
      scored_BT=mask_BT.copy(),
      start_B=document_B >= 0,
      document_B=document_B.astype(np.int32),
      offset_B=np.zeros(B, np.int32),
      source_BS=source_BS,
    )
