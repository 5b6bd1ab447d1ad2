"""Staircases against the paper's equations, chunk by chunk and step by step."""

import functools
import os
from pathlib import Path
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs import staircase
from meliad_rec.archs.staircase import Staircase
from meliad_rec.layers import positions
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import run
from tests import cells
from tests.architectures import B
from tests.architectures import config
from tests.architectures import D
from tests.architectures import H
from tests.architectures import K
from tests.architectures import T as LONG_T
from tests.architectures import W as LONG_W
from tests.archs.memory_cell_test import gradient_bytes
from tests.cells import assert_close
from tests.cells import example
from tests.cells import forward

ROOT = Path(__file__).parents[2]
# Small: the paper's form is compiled chunk by chunk, pass by pass.
L, N, C, T = 2, 3, 2, 10
W = N * C
each = pytest.mark.parametrize(
  'live',
  [1, N, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2))],
)


def make(live, passes=N, **changes):
  settings = {'include_self': True, 'window': W} | changes
  return Staircase(
    config=config(**settings),
    count=L,
    passes=passes,
    live=live,
    diagonal=False,
  )


def plain(live, **options):
  return make(
    live, position=positions.NoPosition, normalize_qk=False, **options
  )


@functools.cache
def parameters(make, live):
  return cells.parameters(make(live), example(T))


def norm(p, x):
  return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p['scale']


def layer(p, x_BCD, older, mask_BX):
  """Computes a chunk that attends to older ones and itself."""
  heads = lambda name, x: (
    norm(p['attention']['norm'], x) @ p['attention'][name]['kernel']
  ).reshape(B, -1, H, K)
  seen = jnp.concatenate([*older, x_BCD], 1)
  q = (
    norm(p['attention']['norm'], x_BCD)
    @ p['attention']['query']['heads']['kernel']
  ).reshape(B, -1, H, K)
  logits = jnp.einsum('bthk,bshk->bhts', q, heads('key', seen)) / K**0.5
  own = x_BCD.shape[1]
  before = seen.shape[1] - own
  causal = np.arange(own)[:, None] + before >= np.arange(seen.shape[1])
  allowed = causal & mask_BX[:, None, None]
  logits = jnp.where(allowed, logits, -1e30)
  prob = jnp.where(allowed, jax.nn.softmax(logits, -1), 0)
  h = jnp.einsum('bhts,bshk->bthk', prob, heads('value', seen))
  h = h.reshape(B, own, H * K)
  x_BCD = x_BCD + h @ p['attention']['output']['linear']['kernel']
  n = norm(p['mlp_norm'], x_BCD)
  hidden = jax.nn.relu(n @ p['mlp']['hidden']['kernel'])
  return x_BCD + hidden @ p['mlp']['output']['linear']['kernel']


def by_steps(p, live, x_BTD, mask_BT, N=N, C=C):
  """Computes equation 3: in step i, chunk c makes its pass i - c."""
  count = T // C
  cut = lambda a, c: a[:, c * C : (c + 1) * C]
  now = [cut(x_BTD, c) for c in range(count)]
  inputs = {}
  for i in range(count + N):
    for c in range(count):
      n = i - c
      if not 0 <= n < max(live, 1):
        continue
      window = range(max(c - (N - 1 - n), 0), c)
      x = now[c]
      for place in range(L):
        inputs[c, n, place] = x
        older = [
          inputs[o, i - o, place]
          if i - o < live
          else (now[o] if live else cut(x_BTD, o))
          for o in window
        ]
        mask_BX = jnp.concatenate([cut(mask_BT, o) for o in [*window, c]], 1)
        x = layer(p[f'layers_{place}'], x, older, mask_BX)
      now[c] = x
  return jnp.concatenate(now, 1)


def with_gradients(f, p, block):
  weight_BTD = np.random.default_rng(2).normal(size=(B, T, D))
  weight_BTD = weight_BTD * block.mask[..., None]

  def loss(p, x_BTD):
    y = f(p, x_BTD)
    return jnp.sum(y * weight_BTD), y * block.mask[..., None]

  return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(p, block.x)


def compare(live, N, C):
  """Compares values and gradients."""
  p, block = parameters(plain, live), example(T)

  def lean(p, x_BTD):
    return plain(live, passes=N).apply(
      {'params': p}, block.replace(x=x_BTD), method=forward
    )[1]

  def plainly(p, x_BTD):
    return by_steps(p, live, x_BTD, block.mask, N, C)

  jax.tree.map(
    assert_close,
    with_gradients(lean, p, block),
    with_gradients(plainly, p, block),
  )


@each
def test_it_is_the_paper_s(live):
  compare(live, N, C)


@pytest.mark.parametrize(
  'live', [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2))]
)
def test_so_are_chunks_of_one_token(live):
  """One live pass resembles a Feedback Transformer; none, a memory network."""
  compare(live, W, 1)


@pytest.mark.parametrize('live', [0, 2, N])
def test_split_by_chunks(live):
  """Segment borders change nothing, even with one chunk per segment."""
  p, block = parameters(make, live), example(T)
  cell = make(live)
  whole = jax.jit(functools.partial(cell.apply, {'params': p}, method=forward))
  state, y = whole(block)
  step = jax.jit(
    lambda s, b: cell.apply({'params': p}, s, b, method='__call__')
  )
  s, parts = cell.apply({'params': p}, B, method='initial_state'), []
  for i in range(0, T, C):
    s, part = step(s, jax.tree.map(lambda a: a[:, i : i + C], block))
    parts.append(part)
  assert_close(np.concatenate(parts, 1), y)
  jax.tree.map(
    lambda a, b: assert_close(a.astype(float), b.astype(float)), s, state
  )


@pytest.mark.slow
def test_split_is_whole_bit_for_bit():
  """Runs in a process with the default XLA settings."""
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  command = [sys.executable, '-m', 'tests.staircase_split']
  done = subprocess.run(
    command, env=env, cwd=ROOT, capture_output=True, text=True, check=False
  )
  assert done.stdout == 'the same\n', done.stderr


@pytest.mark.parametrize(
  'live, passes, setting',
  [
    (None, 4, 'PASSES'),
    (4, 3, 'Staircase.live'),
    (-1, 3, 'Staircase.live'),
  ],
)
def test_impossible_settings(live, passes, setting):
  with pytest.raises(ValueError, match=setting):
    make(live, passes=passes).init(
      jax.random.key(0), example(T), method=forward
    )


def test_segments_are_whole_chunks():
  with pytest.raises(ValueError, match='SEGMENT .* WINDOW / PASSES'):
    make(N).init(jax.random.key(0), example(3), method=forward)


def test_nothing_is_read_step_by_step_without_passes():
  with pytest.raises(ValueError, match='Staircase.diagonal'):
    make(0).clone(diagonal=True).init(
      jax.random.key(0), example(T), method=forward
    )


LONG_N = 4
LONG_C = LONG_W // LONG_N


def diagonal_make(live, diagonal):
  settings = config(include_self=True)
  return Staircase(
    config=settings, count=2, passes=LONG_N, live=live, diagonal=diagonal
  )


@functools.cache
def diagonal_parameters(live):
  return cells.parameters(diagonal_make(live, False), example())


@pytest.mark.parametrize(
  'live, remat',
  [
    pytest.param(1, 'none', marks=pytest.mark.slow),
    pytest.param(2, 'none', marks=pytest.mark.slow),
    pytest.param(LONG_N - 1, 'full', marks=pytest.mark.slow),
    (LONG_N, 'sublayers'),
  ],
)
def test_both_forms_compute_the_same(live, remat):
  """Compares outputs, states and gradients after an earlier segment."""
  p = diagonal_parameters(live)

  def two(diagonal):
    cell = diagonal_make(live, diagonal=diagonal)
    cell = cell.clone(remat=remat if diagonal else 'full')

    def read(p, x_BTD):
      def both(cell):
        first = Block(
          x_BTD[:, : LONG_T - LONG_W],
          example().mask[:, : LONG_T - LONG_W],
        )
        state, a = forward(cell, first)
        rest = Block(
          x_BTD[:, LONG_T - LONG_W :],
          example().mask[:, LONG_T - LONG_W :],
        )
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
  """The default: M > 1, N <= 2 M, and at least M - 1 chunks."""
  read = []
  run_steps = staircase.run_diagonal
  monkeypatch.setattr(
    staircase, 'run_diagonal', lambda *a: read.append(1) or run_steps(*a)
  )

  def runs(live, diagonal, chunks, passes=LONG_N):
    read.clear()
    cell = diagonal_make(live, diagonal).clone(passes=passes)
    p = {'params': diagonal_parameters(live)}
    few = jax.tree.map(lambda a: a[:, : chunks * LONG_W // passes], example())
    jax.eval_shape(functools.partial(cell.apply, p, method=forward), few)
    return bool(read)

  assert not runs(LONG_N, None, LONG_N - 2)
  for diagonal in (True, None):
    assert runs(LONG_N, diagonal, LONG_N - 1)
    assert runs(LONG_N, diagonal, LONG_T // LONG_C)
  assert not runs(LONG_N, False, LONG_T // LONG_C)
  assert not runs(1, None, LONG_T // LONG_C)
  assert runs(1, True, LONG_T // LONG_C)
  # More frozen chunks than live ones are copied for each step.
  assert runs(2, None, LONG_T // LONG_C)
  assert not runs(2, None, LONG_T, passes=LONG_W)
  assert runs(2, True, LONG_T, passes=LONG_W)


@pytest.mark.parametrize('diagonal', [True, None])
@pytest.mark.parametrize('chunks, training', [(LONG_N - 2, False), (1, True)])
def test_only_the_rule_makes_way_for_a_segment_that_is_too_short(
  diagonal, chunks, training
):
  few = jax.tree.map(lambda a: a[:, : chunks * LONG_C], example())
  rngs = {'dropout': jax.random.key(0)} if training else {}
  apply = functools.partial(
    diagonal_make(LONG_N, diagonal).apply, method=forward, rngs=rngs
  )
  read = lambda: jax.eval_shape(
    apply, {'params': diagonal_parameters(LONG_N)}, few
  )
  if not diagonal:
    assert read()[1].shape[1] == chunks * LONG_C
    return
  with pytest.raises(ValueError, match=f'6 tokens.* got {chunks * LONG_C}'):
    read()


def test_prompts_may_end_with_a_chunk():
  few = jax.tree.map(lambda a: a[:, :LONG_C], example())
  found = [
    diagonal_make(LONG_N, diagonal).apply(
      {'params': diagonal_parameters(LONG_N)}, few, method=forward
    )[1]
    for diagonal in (True, False)
  ]
  np.testing.assert_array_equal(*found)


def test_training_copies_no_frozen_window_a_step():
  """One-token chunks, 2 of 64 passes live: steps would take 145 MiB."""
  settings = config(
    d_model=128,
    num_heads=4,
    head_dim=32,
    mlp_dim=512,
    window=64,
    include_self=True,
  )
  cell = Staircase(config=settings, count=1, passes=64, live=2)
  assert gradient_bytes(cell) < 40 * 2**20


def tokens_make(live):
  return Staircase(
    config=config(include_self=True), count=2, passes=LONG_N, live=live
  )


def tokens_example():
  rng = np.random.default_rng(0)
  mask_BT = rng.random((B, LONG_T)) < 0.8
  return Block(rng.normal(size=(B, LONG_T, D)).astype(np.float32), mask_BT)


def tokens_forward(cell, block):
  return run(cell, cell.initial_state(B), block)


@pytest.mark.parametrize(
  'live',
  [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, LONG_N))],
)
def test_tokens_make_chunks(live):
  """Includes padding within chunks, over more chunks than a window holds."""
  cell, block = tokens_make(live), tokens_example()
  init = jax.jit(functools.partial(cell.init, method=tokens_forward))
  params = init(jax.random.key(0), block)
  state, y = jax.jit(
    functools.partial(cell.apply, params, method=tokens_forward)
  )(block)
  step = jax.jit(functools.partial(cell.apply, params, method='decode_step'))
  opened = cell.apply(
    params,
    cell.apply(params, B, method='initial_state'),
    method='to_decode_state',
  )
  for t in range(LONG_T):
    token = jax.tree.map(lambda a, t=t: a[:, t : t + 1], block)
    opened, y_B1D = step(opened, token)
    real = block.mask[:, t]
    np.testing.assert_allclose(y_B1D[real, 0], y[real, t], rtol=1e-4, atol=1e-4)
    assert opened.filled_B[0] == (t + 1) % LONG_C
  end = cell.apply(params, opened, method='to_segment_state')
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
  mask_BA = np.asarray(state.mask_BA)
  assert (np.asarray(end.mask_BA) == mask_BA).all()

  def same(a, b):
    seen = mask_BA[:, mask_BA.shape[1] - a.shape[1] :, None]
    close(a * seen, b * seen)

  jax.tree.map(same, end.written, state.written)
