"""Step by step a staircase computes what it computes chunk by chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs import staircase
from meliad_rec.archs.staircase import Staircase
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import run
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
  settings = config(include_self=True)
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
    pytest.param(2, 'none', marks=pytest.mark.slow),
    pytest.param(N - 1, 'full', marks=pytest.mark.slow),
    (N, 'sublayers'),
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
  """By default, where M > 1 and N is at most 2 M, from M - 1 chunks on."""
  read = []
  run_steps = staircase.run
  monkeypatch.setattr(
    staircase, 'run', lambda *a: read.append(1) or run_steps(*a)
  )

  def runs(live, diagonal, chunks, passes=N):
    read.clear()
    cell = make(live, diagonal).clone(passes=passes)
    p = {'params': parameters(live)}
    few = jax.tree.map(lambda a: a[:, : chunks * W // passes], example())
    jax.eval_shape(functools.partial(cell.apply, p, method=forward), few)
    return bool(read)

  assert not runs(N, None, N - 2)
  for diagonal in (True, None):
    assert runs(N, diagonal, N - 1)
    assert runs(N, diagonal, T // C)
  assert not runs(N, False, T // C)
  assert not runs(1, None, T // C)
  assert runs(1, True, T // C)
  # More frozen chunks than live ones are copied for each step.
  assert runs(2, None, T // C)
  assert not runs(2, None, T, passes=W)
  assert runs(2, True, T, passes=W)


@pytest.mark.parametrize('diagonal', [True, None])
@pytest.mark.parametrize('chunks, training', [(N - 2, False), (1, True)])
def test_only_the_rule_makes_way_for_a_segment_that_is_too_short(
  diagonal, chunks, training
):
  few = jax.tree.map(lambda a: a[:, : chunks * C], example())
  rngs = {'dropout': jax.random.key(0)} if training else {}
  apply = functools.partial(make(N, diagonal).apply, method=forward, rngs=rngs)
  read = lambda: jax.eval_shape(apply, {'params': parameters(N)}, few)
  if not diagonal:
    assert read()[1].shape[1] == chunks * C
    return
  told = (
    f'^diagonal is set, and a segment has {chunks * C} tokens, {chunks} '
    'chunks; step by step it needs 6 or more, .* Set SEGMENT higher, or leave'
  )
  with pytest.raises(ValueError, match=told):
    read()


def test_prompts_may_end_with_a_chunk():
  few = jax.tree.map(lambda a: a[:, :C], example())
  found = [
    make(N, diagonal).apply({'params': parameters(N)}, few, method=forward)[1]
    for diagonal in (True, False)
  ]
  np.testing.assert_array_equal(*found)


def test_training_copies_no_frozen_window_a_step():
  """Chunks of a token, 2 of 64 passes: by steps it would take 145 MiB."""
  settings = sizes(include_self=True)
  cell = Staircase(config=settings, count=1, passes=64, live=2)
  assert gradient_bytes(cell) < 40 * 2**20
