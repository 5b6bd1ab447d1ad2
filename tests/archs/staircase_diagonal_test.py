"""Step by step a staircase computes what it computes chunk by chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs import staircase
from meliad_rec.archs import staircase_diagonal
from meliad_rec.archs.staircase import Staircase
from meliad_rec.cell import Block
from meliad_rec.cell import run
from tests import cells
from tests.architectures import config
from tests.architectures import T
from tests.architectures import W
from tests.archs.memory_cell_test import gradient_bytes
from tests.archs.memory_cell_test import sizes
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
  """By default, where M > 1 and N is at most 2 M; never below M - 1 chunks."""
  read = []
  run_steps = staircase_diagonal.run
  monkeypatch.setattr(
    staircase_diagonal, 'run', lambda *a: read.append(1) or run_steps(*a)
  )

  def runs(live, diagonal, chunks, passes=N):
    read.clear()
    cell = make(live, diagonal).clone(passes=passes)
    p = {'params': parameters(live)}
    few = jax.tree.map(lambda a: a[:, : chunks * W // passes], example())
    jax.eval_shape(functools.partial(cell.apply, p, method=forward), few)
    return bool(read)

  for diagonal in (True, None):
    assert not runs(N, diagonal, N - 2)
    assert runs(N, diagonal, N - 1)
    assert runs(N, diagonal, T // C)
  assert not runs(N, False, T // C)
  assert not runs(1, None, T // C)
  assert runs(1, True, T // C)
  # More frozen chunks than live ones are copied for each step.
  assert runs(2, None, T // C)
  assert not runs(2, None, T, passes=W)
  assert runs(2, True, T, passes=W)


@pytest.mark.parametrize('diagonal, told', [(True, 1), (None, 0)])
def test_a_segment_that_is_too_short_is_told(monkeypatch, diagonal, told):
  lines = []
  monkeypatch.setattr(
    staircase.logging, 'log_first_n', lambda *a: lines.append(a)
  )
  few = jax.tree.map(lambda a: a[:, :C], example())
  apply = functools.partial(make(N, diagonal).apply, method=forward)
  jax.eval_shape(apply, {'params': parameters(N)}, few)
  assert len(lines) == told
  if told:
    _, text, times, *numbers = lines[0]
    assert times == 1
    assert 'segment of 1 chunks is read chunk by chunk' in text % (*numbers,)
    assert 'it needs 3 or more; set SEGMENT' in text % (*numbers,)


def test_training_copies_no_frozen_window_a_step():
  """Chunks of a token, 2 of 64 passes: by steps it would take 145 MiB."""
  settings = sizes(sees_self=True)
  cell = Staircase(config=settings, count=1, passes=64, live=2)
  assert gradient_bytes(cell) < 40 * 2**20
