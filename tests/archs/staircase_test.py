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

from meliad_rec.archs.staircase import Staircase
from meliad_rec.layers import positions
from tests import cells
from tests.architectures import B
from tests.architectures import config
from tests.architectures import D
from tests.architectures import H
from tests.architectures import K
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
  """A chunk, that attends to older ones and itself; mask of all of them."""
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
  """Equation 3: in step i, chunk c makes its pass i - c."""
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
  """The chunk form with the equation, values and gradients."""
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
  """Cached, nearly a Feedback Transformer; of frozen inputs, a memory."""
  compare(live, W, 1)


@pytest.mark.parametrize('live', [0, 2, N])
def test_split_by_chunks(live):
  """Where segments end changes nothing, not even with one chunk each."""
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
  """In a process whose XLA optimises as it does for a run."""
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  command = [sys.executable, '-m', 'tests.staircase_split']
  done = subprocess.run(
    command, env=env, cwd=ROOT, capture_output=True, text=True, check=False
  )
  assert done.stdout == 'the same\n', done.stderr


@pytest.mark.parametrize(
  'live, passes, told',
  [
    (None, 4, 'window of 6 tokens is to be 4 chunks; set PASSES'),
    (4, 3, 'frozen after 4 of 3 passes; set staircase.Stair'),
    (-1, 3, 'frozen after -1 of 3'),
  ],
)
def test_mistakes_are_one_sentence(live, passes, told):
  with pytest.raises(ValueError, match=told):
    make(live, passes=passes).init(
      jax.random.key(0), example(T), method=forward
    )


def test_segments_are_whole_chunks():
  told = 'blocks of 2 tokens; .* Set SEGMENT to a multiple of WINDOW / PASSES'
  with pytest.raises(ValueError, match=told):
    make(N).init(jax.random.key(0), example(3), method=forward)


def test_nothing_is_read_step_by_step_without_passes():
  with pytest.raises(ValueError, match='diagonal is set, .* leave it out'):
    make(0).clone(diagonal=True).init(
      jax.random.key(0), example(T), method=forward
    )
