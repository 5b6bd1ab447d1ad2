"""One exact pass over documents: each target is predicted exactly once."""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import itertools

import jax
from jax.experimental import multihost_utils
import numpy as np

from meliad_rec.data.batch import Batch
from meliad_rec.data.documents import Documents
from meliad_rec.data.lanes import Lanes
from meliad_rec.data.pair_batches import PairBatches
from meliad_rec.data.prefetch import prefetch
from meliad_rec.distributed.partition import local_rows
from meliad_rec.distributed.partition import row_shards
from meliad_rec.metrics.metrics import Sums
from meliad_rec.metrics.totals import label_quality
from meliad_rec.metrics.totals import quality
from meliad_rec.metrics.totals import Totals
from meliad_rec.models.sharded_model import ShardedModel

ABLATE_EVERY = 4  # Segments.
_SEQUENCES = 'sequence_accuracy'
_SHORTEST = 32  # Tokens of a segment that is made shorter.


@dataclasses.dataclass(frozen=True)
class EvalSubset:
  """The part of a split that is evaluated.

  Attributes:
    documents: number of documents, from the beginning of the split. None means
      all.
    tokens: number of tokens of each document, from its beginning. None means
      all.

  Raises:
    ValueError: documents or tokens is below 1.
  """

  documents: int | None = None
  tokens: int | None = None

  def __post_init__(self):
    for name in 'documents', 'tokens':
      value = getattr(self, name)
      if value is not None and value < 1:
        raise ValueError(
          f'EVAL_{name.upper()} must be None or at least 1, got {value}. None '
          f'reads all {name}.'
        )

  def of(self, documents: Documents, vocabulary) -> Documents:
    """Returns this part of a split; see Documents.head.

    Args:
      documents: all documents of the split.
      vocabulary: vocabulary of the ids.
    """
    return documents.head(self.documents, self.tokens, vocabulary)


def run_over(
  documents: Documents,
  sharded: ShardedModel,
  step: Callable,
  params,
  rows: int,
  consume: Callable,
  on_progress: Callable[[int], None] = lambda tokens: None,
  stop: Callable[[], bool] = lambda: False,
) -> bool:
  """Reads documents once, in batches, and runs a step on each batch.

  A batch has the next segment of each row. On a single host, a model that reads
  whole documents and keeps no state reads short ones in shorter segments. A
  pair whose target is longer than a segment is read in a batch of fewer, longer
  rows.

  Args:
    documents: the documents to read. The longest are read first, so that all
      rows end at about the same time.
    sharded: the model that the step runs.
    step: (params, carry, batch) -> (carry, *outputs), compiled on the mesh. The
      carry is the state of the model between two batches.
    params: first argument of the step.
    rows: number of documents read in parallel.
    consume: called as consume(batch, *outputs) for each batch, with global
      arrays on the devices.
    on_progress: called after each batch with the number of tokens read so far.
    stop: called before each batch; if it returns True, reading ends.

  Returns:
    Whether all documents were read; False if `stop` ended this.
  """
  read: Callable = Lanes
  segment = sharded.segment
  if documents.have_sources:
    longest = documents.sequence_lengths[:, 1].max(initial=1)
    doublings = int(-(-longest // segment) - 1).bit_length()
    read = functools.partial(PairBatches, buckets=1 + doublings)
    segment *= 2**doublings
    shards = row_shards(sharded.mesh)
    rows = -(-rows // (2**doublings * shards)) * shards
  local = local_rows(sharded.mesh, rows)
  batches_of = read(
    documents,
    rows,
    segment,
    seed=0,
    shuffle=False,
    repeat=False,
    local_rows=local,
  )
  carry = sharded.empty_carry(params, rows)
  cell = sharded.model.cell
  cuts = cell.needs_whole_document and not cell.is_recurrent
  cuts &= documents.first_lengths is None and jax.process_count() == 1
  previous = None

  def finish(tokens, *results):
    consume(*results)
    on_progress(tokens)

  with contextlib.closing(prefetch(batches_of, 2)) as batches:
    for batch, position in batches:
      if stop():
        return False
      times = len(batch.start_B) // len(local)  # More rows of shorter pairs.
      batch = _without_padding(batch) if cuts else batch
      batch = sharded.put(batch, rows * times)
      carry, *outputs = step(params, carry, batch)
      # Consumed one step late, so that the devices never wait for the host.
      if previous is not None:
        finish(*previous)
      previous = position['tokens'], batch, *outputs
  if previous is not None:
    finish(*previous)
  return True


def _without_padding(batch: Batch) -> Batch:
  """Returns a batch of a fourth of the places, or a sixteenth, and so on.

  There are few lengths, because each one compiles the step again.
  """
  T = batch.mask_BT.shape[1]
  ends = np.flatnonzero(batch.mask_BT.any(0))
  real = max(ends[-1] + 1 if len(ends) else 0, _SHORTEST)
  while real <= (fourth := -(-T // 4)):
    T = fourth
  names = 'tokens_BT', 'targets_BT', 'mask_BT', 'scored_BT'
  return batch.replace(**{name: getattr(batch, name)[:, :T] for name in names})


def gather(*arrays):
  """Returns a tuple of the arguments, with all hosts' rows, as NumPy arrays."""
  return multihost_utils.process_allgather(arrays, tiled=True)


def evaluate(
  sharded: ShardedModel,
  params,
  documents: Documents,
  rows: int,
  stop: Callable[[], bool] = lambda: False,
  losses_out: list[np.ndarray] | None = None,
  on_progress: Callable[[int], None] = lambda tokens: None,
) -> dict[str, float] | None:
  """Evaluates a model on documents.

  Args:
    sharded: the model on its mesh.
    params: parameters of the model.
    documents: the documents to read; see run_over.
    rows: number of documents read in parallel. It affects the speed, the
      metrics of ablations, 'padding_share', 'halting_waste' and
      'expert_imbalance'. It affects other metrics only by rounding.
    stop: called before each batch; if it returns True, evaluation ends.
    losses_out: a float32 array for each document, which every host fills with
      the loss of each target in nats, or NaN at targets that are not scored.
      None means that these losses are not kept.
    on_progress: called after each batch with the number of tokens read so far.

  Returns:
    {metric: value}, or None if `stop` ended the evaluation. The metrics come
    from totals.quality (from totals.label_quality if the documents have labels)
    and from modules that sow some. If documents have several labels or
    are targets, they include 'sequence_accuracy', the share of documents
    without an error, given the right tokens before each one. If the
    model carries a recurrent state from one segment to the next, they include
    the metrics of sharded_model.ablations, measured in one of every
    ABLATE_EVERY batches.

  Raises:
    ValueError: no token was scored.
  """
  totals, segments = Totals(), itertools.count()
  sequences = _Sequences(len(documents))
  model = sharded.model
  carries_state = model.cell.is_recurrent and not model.clear_state
  carries_state &= model.encoder is None
  longest = documents.sequence_lengths.max(initial=0) * model.sequences
  carries_state &= bool(longest > sharded.segment)

  def step(params, carry, batch):
    # The first segments begin documents, and have no earlier state.
    ablate = carries_state and next(segments) % ABLATE_EVERY == 1
    run = sharded.ablation_step if ablate else sharded.eval_step
    return run(params, carry, batch)

  def consume(batch, sums, scores):
    totals.add(sums)
    if losses_out is not None:
      _keep_nats(losses_out, *gather(batch, scores.nats_BT))
    if documents.labels is not None or documents.have_sources:
      wrong_BT = batch.scored_BT & ~scores.correct_BT
      sequences.add(*gather(batch.document_B, batch.scored_BT, wrong_BT))

  completed = run_over(
    documents,
    sharded,
    step,
    params,
    rows,
    consume,
    on_progress,
    stop,
  )
  if not completed:
    return None
  return _metrics(totals, documents) | sequences.metrics() | totals.sown


def metrics_given(documents: Documents) -> list[str]:
  """Returns the names of the metrics that every model has on these documents.

  Metrics that modules sow and metrics of ablations are left out.
  """
  found = list(_metrics(Totals(tokens=1, scored=1), documents))
  several = documents.have_sources
  if documents.labels is not None:
    before = np.concatenate([[0], np.cumsum(documents.labels != 0)])
    several = np.diff(before[documents.starts]).max(initial=0) > 1
  return [*found, _SEQUENCES] if several else found


def evaluate_batch(
  sharded: ShardedModel, params, batch: Batch, rows: int
) -> Sums:
  """Evaluates one batch, starting from ShardedModel.empty_carry.

  Args:
    sharded: the model on its mesh.
    params: parameters of the model.
    batch: the batch, with the rows of this host only.
    rows: number of rows of the whole batch, over all hosts.

  Returns:
    The sums of the batch, copied to the host.
  """
  carry = sharded.empty_carry(params, rows)
  _, sums, _ = sharded.eval_step(params, carry, sharded.put(batch, rows))
  return jax.device_get(sums)


def _metrics(totals, documents):
  if documents.labels is not None:
    return label_quality(totals)
  return quality(
    totals, float(documents.bytes_.sum()), int(documents.words.sum())
  )


class _Sequences:
  """Counts the documents of which all labels are predicted correctly."""

  def __init__(self, documents: int):
    self._scored = np.zeros(documents, np.int64)
    self._wrong = np.zeros(documents, np.int64)

  def add(self, document_B, scored_BT, wrong_BT):
    real_B = document_B >= 0
    for counts, counted_BT in (
      (self._scored, scored_BT),
      (self._wrong, wrong_BT),
    ):
      np.add.at(counts, document_B[real_B], counted_BT[real_B].sum(1))

  def metrics(self) -> dict[str, float]:
    if self._scored.max(initial=0) < 2:
      return {}
    wrong = self._wrong[self._scored > 0]
    return {_SEQUENCES: float((wrong == 0).mean())}


def _keep_nats(losses_out, batch, nats_BT):
  for row in np.flatnonzero(batch.document_B >= 0):
    real = int(batch.mask_BT[row].sum())
    at = batch.offset_B[row]
    nats_T = np.where(batch.scored_BT[row], nats_BT[row], np.nan)
    losses_out[batch.document_B[row]][at : at + real] = nats_T[:real]
