"""LayerDrop in chains: stacks, repeats, and one within the other."""

import functools
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs import stack
from meliad_rec.archs.window import WindowLayer
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import run
from tests.architectures import B
from tests.architectures import config
from tests.architectures import D
from tests.architectures import T


def example():
  x_BTD = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
  return Block(x_BTD, np.ones((B, T), bool))


def forward(cell, block):
  return run(cell, cell.initial_state(B), block)


class Double(Cell):
  """State: how often it ran. Doubles its input, times a parameter."""

  def initial_state(self, batch):
    return jnp.zeros(batch)

  @nn.compact
  def __call__(self, state, block):
    factor = self.param('factor', nn.initializers.ones, (1,))
    return state + 1, 2 * factor * block.x


DOUBLES = {
  'stack': lambda rate: stack.layers(6, Double, layer_drop=rate),
  'scan': lambda rate: stack.layers(6, Double, scan=True, layer_drop=rate),
  'mixed': lambda rate: stack.layers(
    6, Double, lambda: Double(), (2,), scan=True, layer_drop=rate
  ),
}


@pytest.mark.parametrize('kind', DOUBLES)
def test_layers_are_left_out_each_by_itself(kind):
  cell = DOUBLES[kind](0.3)
  ones = Block(jnp.ones((B, T, 1)), np.ones((B, T), bool))
  init = jax.jit(functools.partial(cell.init, method=forward))
  params = init(jax.random.key(0), ones)

  def used(key):
    rngs = {'dropout': key} if key is not None else {}
    state, y = cell.apply(params, ones, method=forward, rngs=rngs)
    return state, jnp.log2(y)

  state, y = jax.vmap(used)(jax.random.split(jax.random.key(1), 1000))
  # Each of the 6 layers doubled, or did not, for the whole batch.
  count_N = np.asarray(y).reshape(1000, -1)
  assert np.ptp(count_N, 1).max() == 0
  shares = np.bincount(count_N[:, 0].round().astype(int), minlength=7) / 1000
  binomial = [math.comb(6, n) * 0.7**n * 0.3 ** (6 - n) for n in range(7)]
  np.testing.assert_allclose(shares, binomial, atol=0.05)
  # What is left out reads all the same.
  assert all((leaf == 1).all() for leaf in jax.tree.leaves(state))
  # Evaluation uses all.
  np.testing.assert_allclose(used(None)[1], 6)


@pytest.mark.parametrize('kind', DOUBLES)
def test_a_layer_that_is_left_out_gets_no_gradients(kind):
  cell = DOUBLES[kind](0.5)
  ones = Block(jnp.ones((B, T, 1)), np.ones((B, T), bool))
  init = jax.jit(functools.partial(cell.init, method=forward))
  params = init(jax.random.key(0), ones)

  def loss(params):
    rngs = {'dropout': jax.random.key(3)}
    y = cell.apply(params, ones, method=forward, rngs=rngs)[1]
    return y.mean(), y[0, 0, 0]

  grads, doubled = jax.grad(loss, has_aux=True)(params)
  grads = np.concatenate([g.ravel() for g in jax.tree.leaves(grads)])
  assert 0 < (grads == 0).sum() < 6
  assert 2.0 ** (grads != 0).sum() == doubled


@pytest.mark.parametrize(
  'scan', [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_without_layer_drop_nothing_is_drawn_for_it(scan):
  """The bits of dropout in the layers are as they were without the option."""
  layer = functools.partial(WindowLayer, config(dropout=0.5))
  cells = stack.layers(2, layer, scan=scan, layer_drop=0.0).cells
  cell = stack.Stack(cells)

  def by_hand(cell, block):
    """What a stack was before there was LayerDrop."""
    states = cell.initial_state(B)
    for each, state in zip(cell.cells, states, strict=True):
      _, y = run(each, state, block)
      block = block.replace(x=y)
    return block.x

  rngs = {'dropout': jax.random.key(5)}
  params = jax.jit(functools.partial(cell.init, method=forward))(
    jax.random.key(0), example()
  )
  _, y = cell.apply(params, example(), method=forward, rngs=rngs)
  expected = cell.apply(params, example(), method=by_hand, rngs=rngs)
  np.testing.assert_array_equal(y, expected)
  _, plain = cell.apply(params, example(), method=forward)
  assert (y != plain).any()


def test_a_share_that_cannot_be_is_an_error():
  cell = stack.layers(2, Double, layer_drop=1.0)
  with pytest.raises(ValueError, match='layer_drop is 1.0; it needs 0 or more'):
    cell.init(jax.random.key(0), example(), method=forward)
