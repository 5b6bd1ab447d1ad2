"""Settings with which a trained model writes targets."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from meliad_rec.config.values import check_count
from meliad_rec.generation.beam import BeamSearch


@dataclasses.dataclass(frozen=True)
class Translation:
  """Settings with which targets are written.

  Attributes:
    beam: the search.
    average: number of last checkpoints whose mean are the parameters (Vaswani
      et al. 2017, section 6.1), at least 1.
  """

  beam: BeamSearch = BeamSearch()
  average: int = 1

  def __post_init__(self):
    check_count('average', self.average, 1)

  @property
  def facts(self) -> dict[str, Any]:
    """The settings as a JSON object."""
    return dataclasses.asdict(self)

  @classmethod
  def of(cls, facts: Mapping[str, Any]) -> 'Translation':
    """Returns the settings of `facts`; what it lacks has its default.

    Raises:
      ValueError: they are not settings of this version.
    """
    try:
      beam = BeamSearch(**facts.get('beam', {}))
      return cls(**{**facts, 'beam': beam})
    except TypeError:
      raise ValueError(
        f'These are not settings of translation: {facts}. Use the version of '
        'meliad_rec that trained the run.'
      ) from None
