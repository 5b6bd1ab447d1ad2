"""Stacks: order, places of special layers, and like layers in one scan."""

import functools

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
  """State: how often it ran. Appends a digit to its input."""

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
  """Digits that `count` layers append, special ones a 2."""
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
  with pytest.raises(
    ValueError, match='different places from -5 to 4. Set REC'
  ):
    tagged(5, places)


def test_special_places_need_a_special_layer():
  with pytest.raises(ValueError, match=r'stand at \(1,\), and none is given'):
    stack.layers(5, lambda: Tag(digit=1), special_at=(1,))
  with pytest.raises(ValueError, match=r'stand at \(\), and one is given; set'):
    stack.layers(5, lambda: Tag(digit=1), lambda: Tag(digit=2))


def test_a_stack_needs_a_layer():
  with pytest.raises(ValueError, match='A stack of 0 layers; set LAYERS'):
    stack.layers(0, lambda: Tag(digit=1))


def test_clear_reaches_every_cell():
  cell = stack.Stack((Tag(digit=1), Tag(digit=2)))
  cleared = cell.apply({}, (np.ones(B), np.ones(B)), method='clear')
  np.testing.assert_array_equal(np.stack(cleared)[:, 0], [0, -1])


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
  with pytest.raises(ValueError, match='cannot share a position module'):
    shapes(position=one, scan=True)


class Known(Tag):
  """A cell of which all is told."""

  sees_later: bool = False
  normalized: bool = False
  remembers: bool = False

  @property
  def causal(self):
    return not self.sees_later

  @property
  def needs_whole_document(self):
    return self.normalized

  @property
  def is_recurrent(self):
    return self.remembers

  def memory_slots(self, state):
    if not self.remembers:
      return super().memory_slots(state)
    return state[:, None, None] + self.digit


def test_one_cell_decides_for_the_stack():
  """Whether it is causal, recurs, and takes whole documents."""
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
    return cell.apply({}, states, method='summary')

  np.testing.assert_array_equal(summary('abcb'), np.full((B, 1, 1), 23))
  np.testing.assert_array_equal(summary('ab'), np.full((B, 1, 1), 1))
  with pytest.raises(ValueError, match='Known has no memory slots to pool'):
    summary('b')
