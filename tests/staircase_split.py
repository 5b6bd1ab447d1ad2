"""Prints 'the same' if staircases read segments bit for bit as the whole.

Outputs, and the state behind them. To be run by itself: XLA is to optimise as
it does for a run, and tests have it do less (conftest.py).
"""

import functools

import jax
import numpy as np

from meliad_rec.models.cell import run
from tests import cells
from tests.architectures import B
from tests.architectures import staircase
from tests.architectures import T

# Passes M until a chunk is frozen, of 4; and whether it is read step by step.
FORMS = (4, True), (4, False), (2, False), (1, False), (0, False)
SEGMENTS = 6, 8, 12


def read(cell, params, length):
  """The state behind all segments of so many tokens, and all outputs."""
  apply = jax.jit(
    lambda state, part: cell.apply(params, state, part, method=run)
  )
  state = cell.apply(params, B, method='initial_state')
  block, outputs = cells.example(T), []
  for i in range(0, T, length):
    part = jax.tree.map(lambda a, i=i: a[:, i : i + length], block)
    state, y_BTD = apply(state, part)
    outputs.append(y_BTD)
  return state, np.concatenate(outputs, 1)


if __name__ == '__main__':
  for live, diagonal in FORMS:
    cell = staircase(live=live, diagonal=diagonal)
    params = {'params': cells.parameters(cell, cells.example(T))}
    whole = read(cell, params, T)
    for length in SEGMENTS:
      told = f'live = {live}, diagonal = {diagonal}, segments of {length}'
      same = functools.partial(np.testing.assert_array_equal, err_msg=told)
      jax.tree.map(same, read(cell, params, length), whole)
  print('the same')
