"""Token by token a staircase reads what it reads chunk by chunk."""

import functools

import jax
import numpy as np
import pytest

from meliad_rec.archs.staircase import Staircase
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import run
from tests.architectures import B
from tests.architectures import config
from tests.architectures import D
from tests.architectures import T
from tests.architectures import W

N = 4
C = W // N


def make(live):
  return Staircase(
    config=config(include_self=True), count=2, passes=N, live=live
  )


def example():
  rng = np.random.default_rng(0)
  mask_BT = rng.random((B, T)) < 0.8
  return Block(rng.normal(size=(B, T, D)).astype(np.float32), mask_BT)


def forward(cell, block):
  return run(cell, cell.initial_state(B), block)


@pytest.mark.parametrize(
  'live',
  [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, N))],
)
def test_tokens_make_chunks(live):
  """With padding within chunks, over more of them than a window holds."""
  cell, block = make(live), example()
  init = jax.jit(functools.partial(cell.init, method=forward))
  params = init(jax.random.key(0), block)
  state, y = jax.jit(functools.partial(cell.apply, params, method=forward))(
    block
  )
  step = jax.jit(functools.partial(cell.apply, params, method='decode_step'))
  opened = cell.apply(
    params,
    cell.apply(params, B, method='initial_state'),
    method='to_decode_state',
  )
  for t in range(T):
    token = jax.tree.map(lambda a, t=t: a[:, t : t + 1], block)
    opened, y_B1D = step(opened, token)
    real = block.mask[:, t]
    np.testing.assert_allclose(y_B1D[real, 0], y[real, t], rtol=1e-4, atol=1e-4)
    assert opened.filled_B[0] == (t + 1) % C
  end = cell.apply(params, opened, method='to_segment_state')
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
  mask_BA = np.asarray(state.mask_BA)
  assert (np.asarray(end.mask_BA) == mask_BA).all()

  def same(a, b):
    seen = mask_BA[:, mask_BA.shape[1] - a.shape[1] :, None]
    close(a * seen, b * seen)

  jax.tree.map(same, end.written, state.written)
