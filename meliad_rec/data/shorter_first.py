"""Short segments in the beginning of a run (Fan et al. 2020, section 4.1).

Gradients then reach less far back, and steps are cheaper.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ShorterFirst:
  """The first steps of a run read shorter segments.

  Attributes:
    segment: tokens of a row in those steps.
    steps: how many there are.
  """

  segment: int
  steps: int

  def __post_init__(self):
    for name in ('segment', 'steps'):
      if getattr(self, name) < 1:
        raise ValueError(
          f'Shorter segments come first, with {name} = {getattr(self, name)}; '
          f'set FIRST_{name.upper()} to 1 or more.'
        )
