"""Step by step a staircase computes what it computes chunk by chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs import staircase_diagonal
from meliad_rec.archs.staircase import Staircase
from meliad_rec.cell import Block
from meliad_rec.cell import run
from tests import cells
from tests.architectures import config
from tests.architectures import T
from tests.architectures import W
from tests.cells import assert_close
from tests.cells import example
from tests.cells import forward

N = 4
C = W // N


def make(live, diagonal):
  settings = config(sees_self=True)
  return Staircase(
    config=settings, count=2, passes=N, live=live, diagonal=diagonal
  )


@functools.cache
def parameters(live):
  return cells.parameters(make(live, False), example())


@pytest.mark.parametrize(
  'live, remat',
  [
    pytest.param(1, 'none', marks=pytest.mark.slow),
    (2, 'sublayers'),
    pytest.param(N - 1, 'full', marks=pytest.mark.slow),
    pytest.param(N, 'none', marks=pytest.mark.slow),
  ],
)
def test_both_forms_compute_the_same(live, remat):
  """From a state that is not the first, in outputs, states and gradients."""
  p = parameters(live)

  def two(diagonal):
    cell = make(live, diagonal=diagonal)
    cell = cell.clone(remat=remat if diagonal else 'full')

    def read(p, x_BTD):
      def both(cell):
        first = Block(x_BTD[:, : T - W], example().mask[:, : T - W])
        state, a = forward(cell, first)
        rest = Block(x_BTD[:, T - W :], example().mask[:, T - W :])
        state, b = run(cell, state, rest)
        return state, jnp.concatenate([a, b], 1)

      state, y = cell.apply({'params': p}, method=both)
      leaves = [*jax.tree.leaves(state.written), y]
      return sum(jnp.sum(jnp.sin(a)) for a in leaves), (state, y)

    return jax.jit(jax.grad(read, (0, 1), has_aux=True))(p, example().x)

  jax.tree.map(
    assert_close,
    *(
      jax.tree.map(lambda a: np.asarray(a, np.float32), two(diagonal))
      for diagonal in (True, False)
    ),
  )


def test_where_it_runs(monkeypatch):
  """By default, where M > 1; never where a segment is below M - 1 chunks."""
  read = []
  run_steps = staircase_diagonal.run
  monkeypatch.setattr(
    staircase_diagonal, 'run', lambda *a: read.append(1) or run_steps(*a)
  )

  def runs(live, diagonal, chunks):
    read.clear()
    cell, p = make(live, diagonal), {'params': parameters(live)}
    few = jax.tree.map(lambda a: a[:, : chunks * C], example())
    jax.eval_shape(functools.partial(cell.apply, p, method=forward), few)
    return bool(read)

  for diagonal in (True, None):
    assert not runs(N, diagonal, N - 2)
    assert runs(N, diagonal, N - 1)
    assert runs(N, diagonal, T // C)
  assert not runs(N, False, T // C)
  assert not runs(1, None, T // C)
  assert runs(1, True, T // C)
