"""Stacks: order, places of special layers, equal layers in one scan."""

import functools
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs import stack
from meliad_rec.archs.stack import Repeat
from meliad_rec.archs.window import WindowLayer
from meliad_rec.layers import positions
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import run
from tests.architectures import config
from tests.architectures import D
from tests.architectures import H
from tests.architectures import recurrent
from tests.architectures import staircase
from tests.architectures import windowed

B, T = 3, 24


class Tag(Cell):
  """State: number of calls. Appends a digit to its input."""

  digit: int

  def initial_state(self, batch):
    return jnp.zeros(batch)

  def __call__(self, state, block):
    return state + 1, 10 * block.x + self.digit

  def clear(self, state):
    return state - self.digit


def example():
  x_BTD = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
  return Block(x_BTD, np.ones((B, T), bool))


def forward(cell, block):
  return run(cell, cell.initial_state(B), block)


def tagged(count, places, scan=False):
  """Returns the cell and the digits that its layers append."""
  cell = stack.layers(
    *(count, lambda: Tag(digit=1)),
    *((lambda: Tag(digit=2)) if places else None, places, scan),
  )
  zeros = Block(np.zeros((B, 1, 1), np.float32), np.ones((B, 1), bool))
  _, y = cell.apply({}, zeros, method=forward)
  return cell, int(y[0, 0, 0])


@pytest.mark.parametrize(
  'places, digits', [((), 11111), ((-3,), 11211), ((0, -1), 21112)]
)
@pytest.mark.parametrize('scan', [False, True])
def test_special_layers_stand_where_they_should(places, digits, scan):
  assert tagged(5, places, scan)[1] == digits


def test_neighbours_that_are_alike_are_scanned():
  cell, _ = tagged(6, (-2,), scan=True)
  kinds = [type(c).__name__ for c in cell.cells]
  assert kinds == ['Repeat', 'Tag', 'Tag']
  assert cell.cells[0].count == 4


@pytest.mark.parametrize('places', [(5,), (-6,), (1, 1), (1, -4)])
def test_places_outside_or_twice_are_errors(places):
  with pytest.raises(ValueError, match='RECURRENT_LAYERS'):
    tagged(5, places)


def test_special_places_need_a_special_layer():
  with pytest.raises(ValueError, match='stack.layers.special'):
    stack.layers(5, lambda: Tag(digit=1), special_at=(1,))
  with pytest.raises(ValueError, match='stack.layers.special'):
    stack.layers(5, lambda: Tag(digit=1), lambda: Tag(digit=2))


def test_a_stack_needs_a_layer():
  with pytest.raises(ValueError, match='LAYERS'):
    stack.layers(0, lambda: Tag(digit=1))


def test_block_length_fits_all_cells():
  assert recurrent().block_length == 8
  assert windowed().block_length is None


def test_block_settings_are_those_of_cells_that_have_blocks():
  assert recurrent().block_setting == 'WINDOW'
  stairs = staircase()
  both = stack.Stack((*recurrent().cells, stairs, Repeat(stairs, 2)))
  assert both.block_setting == 'WINDOW and of WINDOW / PASSES'


def test_layers_may_share_one_position_table():
  def shapes(**shared):
    make = functools.partial(WindowLayer, config())
    cell = stack.layers(3, make, **shared)
    init = functools.partial(cell.init, method=forward)
    return jax.eval_shape(init, jax.random.key(0), example())['params']

  def tables(params):
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [a.shape for path, a in leaves if 'table' in str(path)]

  assert tables(shapes()) == 3 * [(H, 32)]
  one = functools.partial(positions.T5Bias, H)
  assert tables(shapes(position=one)) == [(H, 32)]
  with pytest.raises(ValueError, match='stack.layers.position'):
    shapes(position=one, scan=True)


class Known(Tag):
  """Cell whose properties are fields."""

  sees_later: bool = False
  whole: bool = False
  remembers: bool = False

  @property
  def causal(self):
    return not self.sees_later

  @property
  def needs_whole_document(self):
    return self.whole

  @property
  def is_recurrent(self):
    return self.remembers

  def memory_slots(self, state):
    if not self.remembers:
      return super().memory_slots(state)
    return state[:, None, None] + self.digit


def test_one_cell_decides_for_the_stack():
  """Tests causal, is_recurrent and needs_whole_document."""
  plain = Known(digit=1)
  made = lambda **options: stack.Stack((plain, Known(digit=2, **options)))
  assert (
    made().causal
    and not made().needs_whole_document
    and not made().is_recurrent
  )
  assert not made(sees_later=True).causal
  assert made(whole=True).needs_whole_document
  assert made(remembers=True).is_recurrent


def test_the_summary_is_that_of_the_highest_cell_that_recurs():
  kinds = {'a': Known(digit=1, remembers=True), 'b': Known(digit=2)}
  kinds['c'] = Known(digit=3, remembers=True)
  state = jnp.zeros(B)

  def summary(names):
    cell = stack.Stack(tuple(kinds[name] for name in names))
    states = tuple(state + 10 * i for i in range(len(names)))
    return cell.apply({}, states, method='memory_slots')

  np.testing.assert_array_equal(summary('abcb'), np.full((B, 1, 1), 23))
  np.testing.assert_array_equal(summary('ab'), np.full((B, 1, 1), 1))
  with pytest.raises(ValueError, match='Known has no memory slots'):
    summary('b')


def chain_forward(cell, block):
  return run(cell, cell.initial_state(B), block)


class Double(Cell):
  """State: number of calls. Doubles its input, times a parameter."""

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
  init = jax.jit(functools.partial(cell.init, method=chain_forward))
  params = init(jax.random.key(0), ones)

  def used(key):
    rngs = {'dropout': key} if key is not None else {}
    state, y = cell.apply(params, ones, method=chain_forward, rngs=rngs)
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
  init = jax.jit(functools.partial(cell.init, method=chain_forward))
  params = init(jax.random.key(0), ones)

  def loss(params):
    rngs = {'dropout': jax.random.key(3)}
    y = cell.apply(params, ones, method=chain_forward, rngs=rngs)[1]
    return y.mean(), y[0, 0, 0]

  grads, doubled = jax.grad(loss, has_aux=True)(params)
  grads = np.concatenate([g.ravel() for g in jax.tree.leaves(grads)])
  assert 0 < (grads == 0).sum() < 6
  assert 2.0 ** (grads != 0).sum() == doubled
