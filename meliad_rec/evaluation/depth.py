"""Halting depth: the number of steps in depth that a model takes at each token.

`measure` reads documents and returns their `Depths`: the steps and the answer
(the predicted token or label) at each token. A unit is a group of tokens that
halt together: one token, a chunk of a sequence, or a whole sequence.
`everything`, `by_length` and `by_nesting` summarize documents as `Group`s, and
`table` formats them.

The nesting of a token is the number of brackets around it: `[MAX` and `(` open
a bracket, `]` and `)` close one. Here the nesting is below each token:

    [MAX 2 [MIN 4 7 ] 0 ]
       0 1    1 2 2 1 1 0

Letters of this file: H layers that halt, N tokens or documents, R sequences of
a batch (rows, or halves of rows for pairs), n chunks of a sequence, U units of
a chunk, X positions of a sequence.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.data.batch import Batch
from meliad_rec.data.documents import Documents
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.data.vocabulary import Words
from meliad_rec.distributed import partition
from meliad_rec.distributed.hosts import mesh_jit
from meliad_rec.evaluation.evaluation import gather
from meliad_rec.evaluation.evaluation import run_over
from meliad_rec.evaluation.picture_layers import with_numbers
from meliad_rec.metrics import pictures
from meliad_rec.models.model import Model
from meliad_rec.models.sharded_model import ShardedModel


@dataclasses.dataclass(frozen=True)
class Depths:
  """Steps and answers of a model at the N tokens of some documents.

  In labeled documents, a token's steps and answer are those at its own
  position. In text, they are those at the position before the token, where the
  model predicts it.

  Attributes:
    documents: the documents that were read.
    steps_NH: int32 [N, H], number of steps in depth that the model took in each
      layer that halts, the first layer first.
    begins: bool [N], whether a unit (tokens that halt together) begins at the
      token.
    answers: int32 [N], id of the most likely label or, in text, token. The
      answer for a pair of sequences is at the last token of the pair.
  """

  documents: Documents
  steps_NH: np.ndarray
  begins: np.ndarray
  answers: np.ndarray

  @functools.cached_property
  def steps(self) -> np.ndarray:
    """int32 [N], number of steps in depth, summed over the layers that halt."""
    return self.steps_NH.sum(1, dtype=np.int32)

  def of(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns `steps`, `begins` and `answers` of the tokens of document i."""
    here = slice(*self.documents.starts[i : i + 2])
    return self.steps[here], self.begins[here], self.answers[here]


def measure(
  sharded: ShardedModel,
  params,
  documents: Documents,
  rows: int,
  on_progress: Callable[[int], None] = lambda tokens: None,
) -> Depths:
  """Reads every document once, and returns the model's steps and answers.

  Args:
    sharded: the model on its mesh.
    params: parameters of the model.
    documents: the documents to read; see evaluation.run_over.
    rows: number of documents read in parallel; affects only the speed.
    on_progress: called after each batch with the number of tokens read so far.

  Raises:
    ValueError: the model does not halt.
  """
  depths = None  # Only a batch shows how many layers halt.

  def consume(*outputs):
    nonlocal depths
    batch, *results = gather(*outputs)
    if depths is None:
      N = len(documents.tokens)
      empty = (np.zeros((N, *a.shape[2:]), a.dtype) for a in results)
      depths = Depths(documents, *empty)
    _keep(depths, batch, *results)

  step = mesh_jit(
    sharded.mesh,
    functools.partial(depth_step, sharded.model),
    donate_argnums=1,
    out_shardings=partition.batch_sharding(sharded.mesh, rows),
  )
  run_over(documents, sharded, step, params, rows, consume, on_progress)
  return depths


def depth_step(model: Model, params, carry, batch: Batch):
  """Reads a batch; returns the next carry, and steps, begins and answers.

  The steps are int32 [B, T, H], the last two arrays [B, T]; see Depths.

  Args:
    model: the model.
    params: parameters of the model.
    carry: state of the model before the batch.
    batch: a segment of each row.

  Raises:
    ValueError: the model does not halt.
  """
  (carry, logits_BTV), sown = model.apply(
    {'params': params},
    carry,
    *batch.inputs,
    mutable=[pictures.DEPTHS],
  )
  B, T = batch.mask_BT.shape
  leaves = jax.tree.leaves_with_path(sown)
  leaves.sort(key=lambda leaf: with_numbers(jax.tree_util.keystr(leaf[0])))
  spreads = [
    spread(depth, B, T) for path, depth in leaves if path[-2].key == 'depth'
  ]
  if not spreads:
    raise ValueError(
      f'This model does not halt: {type(model.cell).__name__} takes the same '
      'number of steps for every token. Give a run of arch/universal, '
      'arch/gated_universal or arch/gated_latent_bottleneck without '
      'options/halting/never.'
    )
  steps_BTH = jnp.stack([steps_BT for steps_BT, _ in spreads], -1)
  begins_BT = functools.reduce(jnp.logical_or, (b_BT for _, b_BT in spreads))
  return carry, steps_BTH, begins_BT, jnp.argmax(logits_BTV, -1)


def spread(depth: jax.Array, B: int, T: int) -> tuple[jax.Array, jax.Array]:
  """Spreads the steps of each unit over the positions of the unit.

  Args:
    depth: number of steps of each unit, as a recurrence sowed it: [R, U], or
      [n, R, U] if sequences have n chunks. R is the number of sequences: B, or
      2 B if each row is a pair. U is the number of units in a chunk: 1, or the
      number of positions in the chunk.
    B: number of rows in the batch.
    T: number of positions in each row.

  Returns:
    The steps at each position, int32 [B, T], and whether a unit begins there,
    bool [B, T].
  """
  depth_nRU = depth.reshape(-1, *depth.shape[-2:]).astype(jnp.int32)
  n, R, U = depth_nRU.shape
  # Positions of a sequence; the last chunk may extend beyond them.
  places = B * T // R
  W = -(-places // n)
  depth_RnW = jnp.broadcast_to(depth_nRU.swapaxes(0, 1), (R, n, W))
  cut = lambda a: a.reshape(-1, n * W)[:, :places]
  begins_1X = cut(jnp.arange(n * W) % (W // U) == 0)
  begins_RX = jnp.broadcast_to(begins_1X, (R, places))
  return cut(depth_RnW).reshape(B, T), begins_RX.reshape(B, T)


def _keep(depths, batch, steps_BTH, begins_BT, answers_BT):
  """Copies the results of a batch to the places of its tokens in `depths`."""
  documents = depths.documents
  pairs = (
    (depths.steps_NH, steps_BTH),
    (depths.begins, begins_BT),
    (depths.answers, answers_BT),
  )
  for row in np.flatnonzero(batch.document_B >= 0):
    i = batch.document_B[row]
    here = _token_indices(
      documents, i, batch.offset_B[row], batch.mask_BT.shape[1]
    )
    real_T = batch.mask_BT[row]
    for kept, result in pairs:
      kept[here] = result[row, real_T]
    if documents.first_lengths is not None:
      depths.answers[documents.starts[i + 1] - 1] = answers_BT[row, -1]


def _token_indices(documents, i, at, places):
  """Returns the indices of a batch row's tokens in `documents.tokens`.

  Args:
    documents: all documents.
    i: index of the row's document.
    at: offset of the row's first token in the document, or in each sequence of
      a pair.
    places: number of positions in the row. Each sequence of a pair has half of
      them.
  """
  begin, end = documents.starts[i : i + 2]
  edges = [begin, end]
  if documents.first_lengths is not None:
    edges.insert(1, begin + documents.first_lengths[i])
    places //= 2
  spans = [
    np.minimum([first + at, first + at + places], last)
    for first, last in itertools.pairwise(edges)
  ]
  return np.concatenate([np.arange(*span) for span in spans])


_OPEN, _CLOSE = ('[', '('), (']', ')')


def bracket_steps(vocabulary: Vocabulary) -> np.ndarray | None:
  """Returns int64 [vocabulary size]: the change of the nesting at each id.

  It is 1 at ids that open a bracket, -1 at ids that close one, and 0 at all
  others. Returns None if this is not a vocabulary of words, or if no word opens
  or closes a bracket.
  """
  if not isinstance(vocabulary, Words):
    return None
  steps = np.array(
    [0, *(w.startswith(_OPEN) - w.endswith(_CLOSE) for w in vocabulary.words)]
  )
  return steps if steps.any() else None


def levels(steps: np.ndarray, tokens: np.ndarray) -> np.ndarray:
  """Returns int64 [tokens]: the number of brackets around each token.

  A token that opens or closes a bracket is itself outside this bracket. Numbers
  below 0 count as 0.

  Args:
    steps: the change of the nesting at each id, from `bracket_steps`.
    tokens: ids of one document.
  """
  step_N = steps[tokens]
  return np.maximum(np.cumsum(step_N) - (step_N > 0), 0)


def deepest(steps: np.ndarray, tokens: np.ndarray) -> int:
  """Returns the largest number of brackets around a token of a document.

  Args:
    steps, tokens: see `levels`.
  """
  return int(np.cumsum(steps[tokens]).max(initial=0))


_BINS = 8  # Number of groups by length.


class Group(NamedTuple):
  """Metrics of a group of documents that have a property in common.

  Attributes:
    name: the property, such as '10-20' for lengths of 10 to 20 tokens.
    documents: number of documents in the group.
    mean: mean number of steps in depth over units (tokens that halt together).
    most: largest number of steps in depth of a unit.
    accuracy: share of labels (or, in text, of tokens) that the model predicts
      correctly. None means that there are none to predict.
  """

  name: str
  documents: int
  mean: float
  most: int
  accuracy: float | None


def everything(depths: Depths) -> Group:
  """Returns one Group, named 'all', of all documents that have tokens."""
  return group(depths, 'all', depths.documents.lengths > 0)


def by_length(depths: Depths) -> list[Group]:
  """Returns at most _BINS Groups of documents by length.

  All have about equally many documents. Empty documents are left out.
  """
  lengths = depths.documents.lengths
  parts = np.arange(1, _BINS + 1) / _BINS
  longest = np.unique(np.quantile(lengths[lengths > 0], parts, method='higher'))
  bin_N = np.searchsorted(longest, lengths)
  groups = []
  for i in range(len(longest)):
    chosen_N = (bin_N == i) & (lengths > 0)
    first, last = lengths[chosen_N].min(), lengths[chosen_N].max()
    name = f'{first:,}' if first == last else f'{first:,}-{last:,}'
    groups.append(group(depths, name, chosen_N))
  return groups


def by_nesting(depths: Depths, bracket_steps: np.ndarray) -> list[Group]:
  """Returns Groups of documents by the nesting of their deepest token.

  The nesting of a token is the number of brackets around it. Empty documents
  are left out.

  Args:
    depths: steps and answers of the documents.
    bracket_steps: int [vocabulary size], the change of the nesting at each id:
      1 where a bracket opens, -1 where one closes, else 0.
  """
  documents = depths.documents
  nesting_N = np.array(
    [deepest(bracket_steps, documents[i]) for i in range(len(documents))]
  )
  read_N = documents.lengths > 0
  return [
    group(depths, str(brackets), (nesting_N == brackets) & read_N)
    for brackets in np.unique(nesting_N[read_N])
  ]


def group(depths: Depths, name: str, chosen_N: np.ndarray) -> Group:
  """Returns the metrics of the chosen documents as a Group.

  Args:
    depths: steps and answers of all documents.
    name: name of the group.
    chosen_N: bool [documents]; at least one chosen document is not empty.
  """
  documents = depths.documents
  chosen_tokens = np.repeat(chosen_N, documents.lengths)
  steps = depths.steps[chosen_tokens & depths.begins]
  labels = documents.labels
  targets = documents.tokens if labels is None else labels
  asked = chosen_tokens & (targets != 0)
  right = depths.answers[asked] == targets[asked]
  accuracy = float(right.mean()) if right.size else None
  return Group(
    name=name,
    documents=int(np.count_nonzero(chosen_N)),
    mean=float(steps.mean()),
    most=int(steps.max()),
    accuracy=accuracy,
  )


def table(heading: str, groups: Sequence[Group]) -> str:
  """Returns a table, as text, with one line for each group.

  Args:
    heading: heading of the column of names.
    groups: the groups.
  """
  width = max(len(heading), *(len(each.name) for each in groups))
  lines = [
    f'{heading:{width}} {"documents":>10} {"mean":>7} {"most":>6}  right'
  ]
  for each in groups:
    right = '-' if each.accuracy is None else f'{each.accuracy:.1%}'
    lines.append(
      f'{each.name:>{width}} {each.documents:>10,} {each.mean:>7.2f} '
      f'{each.most:>6}  {right:>5}'
    )
  return '\n'.join(lines)
