"""What a run trains on, and the answers that take no learning."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Protocol
from typing import runtime_checkable

from meliad_rec.data.documents import Documents
from meliad_rec.data.vocabulary import Vocabulary


@runtime_checkable
class Dataset(Protocol):
  """Store, Text, or a generated task.

  Attributes:
    vocabulary: what the ids mean.
    splits: their names; a run reads train and validation.
  """

  vocabulary: Vocabulary
  splits: Sequence[str]

  def documents(self, split: str) -> Documents:
    """The documents of a split."""


@runtime_checkable
class HasBaselines(Protocol):
  """A dataset that knows what trivial answers reach, to judge a result by."""

  def baselines(self, split: str) -> Mapping[str, float]:
    """Share of a split's scored tokens that each trivial answer gets wrong."""


def baselines(data: Dataset, split: str) -> Mapping[str, float]:
  """Those of a split, by name; none where the dataset knows none."""
  return data.baselines(split) if isinstance(data, HasBaselines) else {}
