"""How deep a model goes in documents that have something in common."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meliad_rec.halting_depth.nesting import deepest
from meliad_rec.halting_depth.reading import Depths

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
