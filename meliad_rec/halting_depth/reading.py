"""How many steps a model that halts takes at each token, and what it answers.

A unit is what halts by itself: a token, or where all tokens halt together, a
chunk of a sequence, or all of it.
"""

from collections.abc import Callable
import dataclasses
import functools
import itertools

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from meliad_rec import partition
from meliad_rec.data.batch import Batch
from meliad_rec.data.documents import Documents
from meliad_rec.data.lanes import Lanes
from meliad_rec.data.prefetch import prefetch
from meliad_rec.forward import Forward
from meliad_rec.model import Model
from meliad_rec.within_mesh import WithinMesh


@dataclasses.dataclass(frozen=True)
class Depths:
  """What a model did with the N tokens of some documents.

  It reads a label's token where it gives the label; other text it predicts,
  and a token's steps are those at the place that predicts it.

  Attributes:
    documents: all that was read.
    steps: int32 [N], taken; where recurrences follow one another, by all.
    begins: bool [N], the first token of a unit.
    answers: int32 [N], the likeliest label, or token; of a pair of sequences,
      the one at its end counts.
  """

  documents: Documents
  steps: np.ndarray
  begins: np.ndarray
  answers: np.ndarray

  def of(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, beginnings and answers of document i."""
    here = slice(*self.documents.starts[i : i + 2])
    return self.steps[here], self.begins[here], self.answers[here]


def measure(
  program: Forward,
  params,
  documents: Documents,
  rows: int,
  told: Callable[[int], None] = lambda tokens: None,
) -> Depths:
  """Reads every document once, as in evaluation.

  Args:
    program: holds the model, the mesh, and the segment.
    params: of the model.
    documents: read longest first, so that rows end together.
    rows: documents read side by side; changes speed alone.
    told: called after each segment with the tokens read so far.

  Raises:
    ValueError: nothing in the model halts.
  """
  lanes = Lanes(
    documents,
    rows,
    program.segment,
    seed=0,
    shuffle=False,
    repeat=False,
    rows_here=partition.rows_here(program.mesh, rows),
  )
  step = WithinMesh(
    program.mesh,
    jax.jit(
      functools.partial(read, program.model),
      donate_argnums=1,
      out_shardings=partition.batch_sharding(program.mesh, rows),
    ),
  )
  carry = program.empty_carry(params, rows)
  N = len(documents.tokens)
  ids_N, bool_N = np.zeros(N, np.int32), np.zeros(N, bool)
  found = Depths(documents, ids_N, bool_N, ids_N.copy())
  for batch, position in prefetch(lanes, 2):
    put = program.put(batch, rows)
    carry, *counted = step(params, carry, put)
    _keep(
      found, *multihost_utils.process_allgather((put, *counted), tiled=True)
    )
    told(position['tokens'])
  return found


def read(model: Model, params, carry, batch: Batch):
  """The carry after a segment, then steps, begins and answers, [B, T]."""
  (carry, logits_BTV), sown = model.apply(
    {'params': params},
    carry,
    batch.tokens_BT,
    batch.start_B,
    batch.mask_BT,
    mutable=['pictures'],
  )
  B, T = batch.mask_BT.shape
  spreads = [
    spread(depth, B, T)
    for path, depth in jax.tree.leaves_with_path(sown)
    if path[-2].key == 'depth'
  ]
  if not spreads:
    raise ValueError(
      f'Nothing in this model halts: {type(model.cell).__name__} takes as many '
      'steps for any token; give a run of arch/universal, arch/gated_universal '
      'or arch/gated_latent_bottleneck, without options/halt_never.'
    )
  steps_BT = sum(steps_BT for steps_BT, _ in spreads)
  begins_BT = functools.reduce(jnp.logical_or, (b_BT for _, b_BT in spreads))
  return carry, steps_BT, begins_BT, jnp.argmax(logits_BTV, -1)


def spread(depth: jax.Array, B: int, T: int) -> tuple[jax.Array, jax.Array]:
  """Steps at each place, int32 [B, T], and whether a unit begins there.

  Args:
    depth: what a recurrence sowed: [B, U], or of n chunks [n, B, U]; U is 1, or
      the places of a chunk. Of pairs it has a row for each sequence.
    B: rows of the batch.
    T: places of each.
  """
  depth_nRU = depth.reshape(-1, *depth.shape[-2:]).astype(jnp.int32)
  n, R, U = depth_nRU.shape
  places = B * T // R  # Of a sequence; the last chunk may go beyond it.
  W = -(-places // n)
  depth_RnW = jnp.broadcast_to(depth_nRU.swapaxes(0, 1), (R, n, W))
  cut = lambda a: a.reshape(-1, n * W)[:, :places]
  begins_1X = cut(jnp.arange(n * W) % (W // U) == 0)
  begins_RX = jnp.broadcast_to(begins_1X, (R, places))
  return cut(depth_RnW).reshape(B, T), begins_RX.reshape(B, T)


def _keep(found, batch, steps_BT, begins_BT, answers_BT):
  """Puts what a segment had at its documents' tokens."""
  documents = found.documents
  counted = (steps_BT, begins_BT, answers_BT)
  kept = (found.steps, found.begins, found.answers)
  for row in np.flatnonzero(batch.document_B >= 0):
    i = batch.document_B[row]
    here = _tokens(documents, i, batch.offset_B[row], batch.mask_BT.shape[1])
    real_T = batch.mask_BT[row]
    for all_N, some_BT in zip(kept, counted, strict=True):
      all_N[here] = some_BT[row, real_T]
    if documents.middles is not None:
      found.answers[documents.starts[i + 1] - 1] = answers_BT[row, -1]


def _tokens(documents, i, at, places):
  """Where the tokens of a row are among those of all documents."""
  begin, end = documents.starts[i : i + 2]
  edges = [begin, end]
  if documents.middles is not None:
    edges.insert(1, begin + documents.middles[i])
    places //= 2
  spans = [
    np.minimum([first + at, first + at + places], last)
    for first, last in itertools.pairwise(edges)
  ]
  return np.concatenate([np.arange(*span) for span in spans])
