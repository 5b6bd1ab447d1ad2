"""The interface of a dataset, and the error rates of trivial baselines."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Protocol
from typing import runtime_checkable

from meliad_rec.data.documents import Documents
from meliad_rec.data.vocabulary import Vocabulary


@runtime_checkable
class Dataset(Protocol):
  """A Store, a Text or a synthetic task.

  Attributes:
    vocabulary: the vocabulary of the ids.
    splits: names of the splits. A run reads train and validation.
  """

  vocabulary: Vocabulary
  splits: Sequence[str]

  def documents(self, split: str) -> Documents:
    """Returns the documents of a split.

    Raises:
      ValueError: there is no such split, or it cannot be read or generated.
    """


@runtime_checkable
class HasBaselines(Protocol):
  """A dataset that knows the error rates of trivial baselines."""

  def baselines(self, split: str) -> Mapping[str, float]:
    """Returns {name: error rate on scored tokens} of trivial predictors."""


def baselines(data: Dataset, split: str) -> Mapping[str, float]:
  """Returns the dataset's baselines for a split, or {} if it has none."""
  return data.baselines(split) if isinstance(data, HasBaselines) else {}
