"""How deep words lie in brackets: `[MAX` and `(` open one, `]` and `)` close.

[MAX 2 [MIN 4 7 ] 0 ]
   0 1    1 2 2 1 1 0
"""

import numpy as np

from meliad_rec.data.vocabulary import Vocabulary
from meliad_rec.data.word_vocabulary import Words

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
