"""Chunks of equal length: how long, and that nothing else is new."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.latent_bottleneck import Chunks
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import run
from tests import architectures as tiny
from tests.architectures import core_config
from tests.architectures import D
from tests.architectures import S
from tests.architectures import W


class Length(Cell):
  """State: chunks that held a token. Says how long each chunk is."""

  def initial_state(self, batch):
    return jnp.zeros(batch)

  def __call__(self, state_B, block):
    length = block.mask.shape[1]
    return state_B + block.mask.any(1), jnp.full_like(block.x, length)

  def clear(self, state_B):
    return 0 * state_B

  def memory_slots(self, state_B):
    return state_B[:, None, None]

  @property
  def is_recurrent(self):
    return True


def lengths(tokens, **options):
  """Of the chunks that segments are cut into, and how many rows fill."""
  cell = Chunks(Length(), **options)
  mask_BT = np.arange(tokens) < np.array([tokens, tokens // 2])[:, None]
  block = Block(np.zeros((2, tokens, 1), np.float32), mask_BT)
  state_B, y_BTD = cell.apply({}, jnp.zeros(2), block)
  assert y_BTD.shape == (2, tokens, 1)
  (length,) = set(np.unique(y_BTD))
  return length, state_B.tolist()


@pytest.mark.parametrize(
  'tokens, options, length, filled',
  [
    (512, {'length': 100}, 86, [6, 3]),
    (1024, {'length': 100}, 94, [11, 6]),
    (512, {'count': 5}, 103, [5, 3]),
    (1024, {'count': 5}, 205, [5, 3]),
    (100, {'length': 100}, 100, [1, 1]),
    (12, {'length': 4}, 4, [3, 2]),
    # Of five chunks of four the last would be empty, and is not counted.
    (16, {'count': 5}, 4, [4, 2]),
    (3, {'count': 5}, 1, [3, 1]),
  ],
)
def test_how_long_chunks_are(tokens, options, length, filled):
  assert lengths(tokens, **options) == (length, filled)


def bottleneck(chunk):
  core = tiny.transformer(1, memory=True)
  return tiny.LatentBottleneck(core_config(), core, slots=S, chunk=chunk)


def example(tokens):
  rng = np.random.default_rng(0)
  x_BTD = rng.normal(size=(2, tokens, D)).astype(np.float32)
  return Block(x_BTD, np.arange(tokens) < np.array([[tokens], [W + 1]]))


def forward(cell, block):
  return run(cell, cell.initial_state(len(block.mask)), block)


@functools.cache
def outcome(chunked, tokens, padded):
  """State, outputs and gradients, of chunks made or of fixed length."""
  cell = Chunks(bottleneck(None), length=W) if chunked else bottleneck(W)
  block = jax.tree.map(
    lambda a: np.pad(a, ((0, 0), (0, padded)) + ((0, 0),) * (a.ndim - 2)),
    example(tokens),
  )
  init = functools.partial(bottleneck(W).init, method=forward)
  params = jax.jit(init)(jax.random.key(0), example(W))['params']

  def loss(params):
    inner = {'cell': params} if chunked else params
    state, y_BTD = cell.apply({'params': inner}, block, method=forward)
    y_BTD = y_BTD[:, :tokens]
    return jnp.sum(jnp.sin(y_BTD)) + jnp.sum(state**2), (state, y_BTD)

  return jax.jit(jax.grad(loss, has_aux=True))(params)


@pytest.mark.parametrize(
  'tokens, padded',
  [pytest.param(2 * W, 0, marks=pytest.mark.slow), (2 * W - 1, 1)],
)
def test_is_the_cell_in_chunks(tokens, padded):
  """That of a fixed length where it divides; else with padding at the end."""
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
    outcome(True, tokens, 0),
    outcome(False, tokens, padded),
  )


def test_what_it_takes_from_the_cell():
  cell = Chunks(Length(), count=2)
  assert cell.is_recurrent and cell.causal
  assert cell.needs_whole_document and cell.takes_segments and cell.scans_blocks
  assert not cell.can_step and cell.block_length is None
  state_B = jnp.arange(2.0)
  clear = cell.apply({}, state_B, method='clear')
  np.testing.assert_array_equal(clear, [0, 0])
  summary = cell.apply({}, state_B, method='summary')
  np.testing.assert_array_equal(summary[:, 0, 0], [0, 1])
  assert not Chunks(tiny.windowed(), count=2).is_recurrent
  both = tiny.LatentBottleneck(
    core_config(causal=False), tiny.transformer(memory=True, causal=False), S
  )
  assert not Chunks(both, count=2).causal


@pytest.mark.parametrize(
  'options', [{}, {'length': 4, 'count': 2}, {'length': 0}, {'count': -1}]
)
def test_one_of_length_and_count_is_needed(options):
  with pytest.raises(
    ValueError, match='length and count to 1 or more, and not'
  ):
    lengths(12, **options)


def test_a_cell_that_cuts_blocks_itself_is_refused():
  """Its own length would be ignored."""
  cell = Chunks(bottleneck(W), length=W)
  message = f'LatentBottleneck takes blocks of {W} tokens; set latent_bottle'
  with pytest.raises(ValueError, match=message):
    cell.init(jax.random.key(0), example(W), method=forward)
