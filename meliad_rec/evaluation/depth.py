"""How many steps a model that halts takes at each token, and what it answers.

A unit is what halts by itself: a token, or where all tokens halt together, a
chunk of a sequence, or all of it.

How deep words lie in brackets: `[MAX` and `(` open one, `]` and `)` close.

[MAX 2 [MIN 4 7 ] 0 ]
   0 1    1 2 2 1 1 0

How deep a model goes in documents that have something in common.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from meliad_rec.data.batch import Batch
from meliad_rec.data.documents import Documents
from meliad_rec.data.lanes import Lanes
from meliad_rec.data.prefetch import prefetch
from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.data.vocabulary import Words
from meliad_rec.distributed import partition
from meliad_rec.distributed.hosts import MeshJit
from meliad_rec.models.model import Model
from meliad_rec.models.sharded_model import ShardedModel


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
  program: ShardedModel,
  params,
  documents: Documents,
  rows: int,
  on_progress: Callable[[int], None] = lambda tokens: None,
) -> Depths:
  """Reads every document once, as in evaluation.

  Args:
    program: holds the model, the mesh, and the segment.
    params: of the model.
    documents: read longest first, so that rows end together.
    rows: documents read side by side; changes speed alone.
    on_progress: called after each segment with the tokens read so far.

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
    local_rows=partition.local_rows(program.mesh, rows),
  )
  step = MeshJit(
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
    on_progress(position['tokens'])
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


_OPEN, _CLOSE = ('[', '('), (']', ')')


def bracket_steps(vocabulary: Vocabulary) -> np.ndarray | None:
  """int64 [ids], 1 where an id opens a bracket, -1 where it closes one.

  None: it is no vocabulary of words, or none of them is a bracket.
  """
  if not isinstance(vocabulary, Words):
    return None
  steps = np.array(
    [0, *(w.startswith(_OPEN) - w.endswith(_CLOSE) for w in vocabulary.words)]
  )
  return steps if steps.any() else None


def levels(steps: np.ndarray, tokens: np.ndarray) -> np.ndarray:
  """int64 [tokens], brackets around each; around itself where it is one.

  Args:
    steps: of `bracket_steps`.
    tokens: ids. Brackets that nothing opened count as none.
  """
  step_N = steps[tokens]
  return np.maximum(np.cumsum(step_N) - (step_N > 0), 0)


def deepest(steps: np.ndarray, tokens: np.ndarray) -> int:
  """Brackets around the innermost token; arguments as of `levels`."""
  return int(np.cumsum(steps[tokens]).max(initial=0))


_BINS = 8  # Of documents by length, about equally many in each.


class Group(NamedTuple):
  """Figures of some documents.

  Attributes:
    name: what they have in common.
    documents: how many.
    mean: steps of their units, on average.
    most: steps of the unit that took most.
    accuracy: share of their labels, or tokens, that the model has right; None:
      they have no labels.
  """

  name: str
  documents: int
  mean: float
  most: int
  accuracy: float | None


def everything(depths: Depths) -> Group:
  """All documents."""
  return group(depths, 'all', depths.documents.lengths > 0)


def by_length(depths: Depths) -> list[Group]:
  """Documents from the shortest on, in groups of about as many."""
  lengths = depths.documents.lengths
  parts = np.arange(1, _BINS + 1) / _BINS
  upto = np.unique(np.quantile(lengths[lengths > 0], parts, method='higher'))
  bin_N = np.searchsorted(upto, lengths)
  groups = []
  for place in range(len(upto)):
    chosen_N = (bin_N == place) & (lengths > 0)
    first, last = lengths[chosen_N].min(), lengths[chosen_N].max()
    name = f'{first:,}' if first == last else f'{first:,}-{last:,}'
    groups.append(group(depths, name, chosen_N))
  return groups


def by_nesting(depths: Depths, bracket_steps: np.ndarray) -> list[Group]:
  """Documents by the brackets around their innermost token.

  Args:
    depths: of the documents.
    bracket_steps: of nesting.bracket_steps.
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
  """The figures of chosen documents.

  Args:
    depths: of all.
    name: for the group.
    chosen_N: bool, of each document; at least one that is not empty.
  """
  documents = depths.documents
  of_tokens = np.repeat(chosen_N, documents.lengths)
  steps = depths.steps[of_tokens & depths.begins]
  labels = documents.labels
  targets = documents.tokens if labels is None else labels
  asked = of_tokens & (targets != 0)
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
  """Groups as lines of text."""
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
