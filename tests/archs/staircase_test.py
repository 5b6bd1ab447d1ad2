"""Staircases against the paper's equations, chunk by chunk and step by step."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs import staircase
from meliad_rec.archs.memory_cell import Memory
from meliad_rec.archs.staircase import Staircase
from meliad_rec.layers import positions
from meliad_rec.models.cell import run
from tests import architectures as tiny
from tests import cells
from tests import plain_layer
from tests.architectures import B
from tests.architectures import config
from tests.architectures import K
from tests.architectures import T
from tests.architectures import W
from tests.cells import assert_close
from tests.cells import example
from tests.cells import part
from tests.plain_layer import heads
from tests.plain_layer import norm

N = 4
C = W // N
slow = pytest.mark.slow


@functools.cache
def parameters(live):
  return cells.parameters(tiny.staircase(live=live))


# Small: the paper's form runs chunk by chunk, pass by pass.
FEW_L, FEW_W, FEW_T = 2, 6, 8


@jax.jit
def layer(p, x_BCD, older, mask_BX):
  """Computes a chunk that attends to older ones and itself."""
  n = norm(p['attention']['norm'], x_BCD)
  q = heads(p['attention']['query']['heads'], n) / K**0.5
  seen = jnp.concatenate([*older, x_BCD], 1)
  n = norm(p['attention']['norm'], seen)
  k, v = (heads(p['attention'][name], n) for name in ('key', 'value'))
  before, own = seen.shape[1] - x_BCD.shape[1], x_BCD.shape[1]
  causal = np.arange(own)[:, None] + before >= np.arange(seen.shape[1])
  h = plain_layer.attention(q, k, v, causal & mask_BX[:, None])
  return plain_layer.output(p, x_BCD, h)


def by_steps(live, N, C, p, block):
  """Computes equation 3: in step i, chunk c makes its pass i - c."""
  count = FEW_T // C
  cut = lambda a, c: a[:, c * C : (c + 1) * C]
  now = [cut(block.x, c) for c in range(count)]
  inputs = {}
  for i in range(count + N):
    for c in range(count):
      n = i - c
      if not 0 <= n < max(live, 1):
        continue
      window = range(max(c - (N - 1 - n), 0), c)
      x = now[c]
      for place in range(FEW_L):
        inputs[c, n, place] = x
        older = [
          inputs[o, i - o, place]
          if i - o < live
          else (now[o] if live else cut(block.x, o))
          for o in window
        ]
        mask = [cut(block.mask, o) for o in [*window, c]]
        x = layer(p[f'layers_{place}'], x, older, np.concatenate(mask, 1))
      now[c] = x
  return (), jnp.concatenate(now, 1)


@pytest.mark.parametrize(
  'live, N, C',
  [
    (2, 3, 2),
    pytest.param(3, 3, 2, marks=slow),
    # Resembles a Feedback Transformer.
    pytest.param(1, 6, 1, marks=slow),
    pytest.param(1, 3, 2, marks=slow),
    # A memory network.
    pytest.param(0, 3, 2, marks=slow),
  ],
)
def test_it_is_the_paper_s(live, N, C):
  """Compares values and gradients."""
  plain = {'position': positions.NoPosition, 'normalize_qk': False}
  cell = Staircase(
    config=config(include_self=True, window=FEW_W, **plain),
    count=FEW_L,
    passes=N,
    live=live,
    diagonal=False,
  )
  block = example(FEW_T)

  def lean(p, block):
    return (), cell.apply({'params': p}, block, method=cells.forward)[1]

  plainly = functools.partial(by_steps, live, N, C)
  params = cells.parameters(cell, block)
  expected = cells.outcome(plainly, params, block, compiled=False)
  assert_close(cells.outcome(lean, params, block), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
  'live, remat', [(2, 'none'), (1, 'full'), (3, 'sublayers')]
)
def test_both_forms_compute_the_same(live, remat):
  """Compares outputs, states and gradients after a partly masked memory."""
  rng, block = np.random.default_rng(3), example(FEW_T)
  settings = config(include_self=True, window=FEW_W)
  cell = tiny.staircase(3, live=live).clone(config=settings)
  p = cells.parameters(cell, block)
  empty = cell.apply({'params': p}, B, method='initial_state')
  draw = lambda a: rng.normal(size=a.shape).astype(np.float32)
  given = {'p': p, 'memory': jax.tree.map(draw, empty.written)}
  mask_BA = rng.random(empty.mask_BA.shape) < 0.8

  def of(diagonal):
    form = cell.clone(diagonal=diagonal, remat=remat if diagonal else 'full')

    def read(given, block):
      state = Memory(given['memory'], mask_BA)
      state, y_BTD = form.apply({'params': given['p']}, state, block)
      return state.written, y_BTD

    return cells.outcome(read, given, block)

  assert_close(of(True), of(False))


def read(cell, params, length):
  """Returns the state after all segments of so many tokens, and all outputs."""
  apply = jax.jit(
    lambda state, part: cell.apply(params, state, part, method=run)
  )
  state = cell.apply(params, B, method='initial_state')
  outputs = []
  for i in range(0, T, length):
    state, y_BTD = apply(state, part(example(), i, i + length))
    outputs.append(y_BTD)
  return state, np.concatenate(outputs, 1)


@pytest.mark.parametrize('live', [2, N])
def test_one_chunk_per_segment(live):
  cell = tiny.staircase(live=live, diagonal=False)
  params = {'params': parameters(live)}
  assert_close(read(cell, params, C), read(cell, params, T))


def test_which_form_a_segment_is_read_in(monkeypatch):
  """In steps by default if M > 1, N <= 2 M, and there are M - 1 chunks."""
  calls = []
  run_steps = staircase.run_diagonal
  monkeypatch.setattr(
    staircase, 'run_diagonal', lambda *a: calls.append(1) or run_steps(*a)
  )

  def runs(live, diagonal, chunks, passes=N, **rngs):
    calls.clear()
    cell = tiny.staircase(passes, live=live, diagonal=diagonal)
    block = part(example(), 0, chunks * W // passes)
    apply = functools.partial(cell.apply, method=cells.forward, rngs=rngs)
    jax.eval_shape(apply, {'params': parameters(live)}, block)
    return bool(calls)

  for diagonal in (True, None):
    assert runs(N, diagonal, N - 1)
  assert not runs(N, False, T // C)
  assert not runs(1, None, T // C)
  assert runs(1, True, T // C)
  # More frozen chunks than live ones are copied for each step.
  assert runs(2, None, T // C)
  assert not runs(2, None, T, passes=W)
  assert runs(2, True, T, passes=W)
  # Segments that are too short are read by chunks, but in training not against
  # one's word.
  for chunks in 1, N - 2:
    assert not runs(N, None, chunks, dropout=jax.random.key(0))
    assert not runs(N, True, chunks)
    with pytest.raises(ValueError, match=f'6 tokens.* got {chunks * C}'):
      runs(N, True, chunks, dropout=jax.random.key(0))


@pytest.mark.parametrize('chunks', [N - 1, N + 1])
def test_steps_before_and_after_the_scan_are_computed_again_too(chunks):
  block = part(example(), 0, chunks * C)

  def checkpoints(remat):
    cell = tiny.staircase().clone(remat=remat)
    apply = functools.partial(cell.apply, method=cells.forward)
    traced = jax.make_jaxpr(apply)({'params': parameters(None)}, block)
    return len(re.findall(r'= (?:remat2?|checkpoint)\[', str(traced)))

  in_scan = int(chunks >= N)
  assert checkpoints(None) == in_scan
  assert checkpoints('full') == in_scan + 2 * (N - 1)


def test_a_single_pass_is_live():
  with pytest.raises(ValueError, match='live must be from 1 to 1 passes'):
    cells.shapes(tiny.staircase(1, live=0))


def test_segments_are_whole_chunks():
  with pytest.raises(ValueError, match='SEGMENT .* WINDOW / PASSES'):
    cells.shapes(tiny.staircase(), example(3))


def test_tokens_make_chunks():
  """Includes padding within chunks, over more chunks than a window holds."""
  cell, params = tiny.staircase(live=3), {'params': parameters(3)}
  block = example()
  block.mask[:] = np.random.default_rng(0).random((B, T)) < 0.8
  state, y = cells.apply(cell, parameters(3), block)
  step = jax.jit(functools.partial(cell.apply, params, method='decode_step'))
  opened = cell.apply(
    params,
    cell.apply(params, B, method='initial_state'),
    method='to_decode_state',
  )
  for t in range(T):
    opened, y_B1D = step(opened, part(block, t, t + 1))
    real = block.mask[:, t]
    assert_close(y_B1D[real, 0], y[real, t])
    assert opened.filled_B[0] == (t + 1) % C
  end = cell.apply(params, opened, method='to_segment_state')
  np.testing.assert_array_equal(end.mask_BA, state.mask_BA)
  seen = lambda a: a * state.mask_BA[:, -a.shape[1] :, None]
  assert_close(*(jax.tree.map(seen, s.written) for s in (end, state)))
