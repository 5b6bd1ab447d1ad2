"""The interface of a dataset, and the error rates of trivial predictors."""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import Protocol
from typing import runtime_checkable

from meliad_rec.data.documents import check_split
from meliad_rec.data.documents import Documents
from meliad_rec.data.vocabulary import Vocabulary


@runtime_checkable
class Dataset(Protocol):
  """The interface of a dataset: a Store, a Text or a synthetic task.

  Attributes:
    vocabulary: the vocabulary of the ids.
    splits: names of the splits. Training reads 'train' and 'validation'.
  """

  vocabulary: Vocabulary
  splits: Sequence[str]

  def documents(self, split: str) -> Documents:
    """Returns the documents of a split.

    Raises:
      ValueError: there is no such split, or it cannot be read or generated.
    """


class Cached:
  """Base class of datasets that keep the documents of each split in memory."""

  splits: Sequence[str]

  def documents(self, split: str) -> Documents:
    """Returns all documents of a split; see Dataset."""
    check_split(split, self.splits)
    if split not in self._cache:
      self._cache[split] = self._documents(split)
    return self._cache[split]

  @functools.cached_property
  def _cache(self) -> dict[str, Documents]:
    return {}

  def _documents(self, split: str) -> Documents:
    """Makes the documents of a split; subclasses define it."""
    raise NotImplementedError


@runtime_checkable
class HasBaselines(Protocol):
  """A dataset that knows the error rates of trivial predictors."""

  def baselines(self, split: str) -> Mapping[str, float]:
    """Returns {name of a trivial predictor: its error rate on a split}.

    The error rate is the share of scored tokens that the predictor gets wrong,
    from 0 to 1.
    """


def baselines(data: Dataset, split: str) -> Mapping[str, float]:
  """Returns {name of a trivial predictor: its error rate on a split}.

  Returns {} if the dataset is not a HasBaselines.
  """
  return data.baselines(split) if isinstance(data, HasBaselines) else {}
