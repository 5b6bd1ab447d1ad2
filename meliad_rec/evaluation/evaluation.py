"""One exact pass over documents: every target predicted once, none twice."""

from collections.abc import Callable
import dataclasses

import jax
from jax.experimental import multihost_utils
import numpy as np

from meliad_rec.data.batch import Batch
from meliad_rec.data.documents import Documents
from meliad_rec.data.lanes import Lanes
from meliad_rec.data.prefetch import prefetch
from meliad_rec.distributed.partition import local_rows
from meliad_rec.metrics.metrics import label_quality
from meliad_rec.metrics.metrics import quality
from meliad_rec.metrics.metrics import Sums
from meliad_rec.metrics.metrics import Totals
from meliad_rec.models.sharded_model import ShardedModel


@dataclasses.dataclass(frozen=True)
class Part:
  """Which part of a split is evaluated; None: all of it.

  Attributes:
    documents: the first so many documents.
    tokens: the first so many tokens of each.
  """

  documents: int | None = None
  tokens: int | None = None

  def of(self, documents: Documents, vocabulary) -> Documents:
    return documents.head(self.documents, self.tokens, vocabulary)


def evaluate(
  program: ShardedModel,
  params,
  documents: Documents,
  rows: int,
  stop: Callable[[], bool] = lambda: False,
  nats_of: list[np.ndarray] | None = None,
  on_progress: Callable[[int], None] = lambda tokens: None,
) -> dict[str, float] | None:
  """Figures of one pass, with a carry of its own.

  Args:
    program: holds the model, the mesh, and the segment.
    params: what to evaluate.
    documents: read longest first, so that rows end together.
    rows: documents read side by side; changes no figure but the last digits.
    stop: asked before each segment; the pass is given up where it says so.
    nats_of: one float32 array per document, filled with the nats of each
      target, on every host; NaN where it is not scored.
    on_progress: called after each segment with the tokens counted so far.

  Returns:
    Figures of metrics.quality, or label_quality, and those that modules sowed;
    None if it was given up.
  """
  lanes = Lanes(
    documents,
    rows,
    program.segment,
    seed=0,
    shuffle=False,
    repeat=False,
    local_rows=local_rows(program.mesh, rows),
  )
  totals = Totals()
  carry = program.empty_carry(params, rows)
  batches = prefetch(lanes, 2)
  pending = None
  for batch, _ in batches:
    if stop():
      batches.close()
      return None
    put = program.put(batch, rows)
    carry, sums, nats_BT = program.eval_step(params, carry, put)
    # Read a step late, so that the devices never wait for the host.
    if pending is not None:
      _add(totals, nats_of, *pending)
      on_progress(totals.tokens)
    pending = sums, put, nats_BT
  _add(totals, nats_of, *pending)
  on_progress(totals.tokens)
  return _figures(totals, documents) | totals.sown


def figures_given(documents: Documents) -> list[str]:
  """Names of the figures that `evaluate` gives of these, whatever the model."""
  return list(_figures(Totals(tokens=1, scored=1), documents))


def probe(program: ShardedModel, params, batch: Batch, rows: int) -> Sums:
  """Counts of one batch, read from an empty carry; on the host."""
  carry = program.empty_carry(params, rows)
  _, sums, _ = program.eval_step(params, carry, program.put(batch, rows))
  return jax.device_get(sums)


def _figures(totals, documents):
  if documents.labels is not None:
    return label_quality(totals)
  return quality(
    totals, float(documents.bytes_.sum()), int(documents.words.sum())
  )


def _add(totals, nats_of, sums, batch, nats_BT):
  totals.add(sums)
  if nats_of is None:
    return
  batch = multihost_utils.process_allgather(batch, tiled=True)
  nats_BT = multihost_utils.process_allgather(nats_BT, tiled=True)
  for row in np.flatnonzero(batch.document_B >= 0):
    real = int(batch.mask_BT[row].sum())
    at = batch.offset_B[row]
    nats_T = np.where(batch.scored_BT[row], nats_BT[row], np.nan)
    nats_of[batch.document_B[row]][at : at + real] = nats_T[:real]
