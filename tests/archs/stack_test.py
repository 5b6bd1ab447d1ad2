"""Stacks and repeats: order, special layers, equal layers in one scan."""

import functools
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs import stack
from meliad_rec.archs.block_recurrent import BlockRecurrentLayer
from meliad_rec.archs.stack import Repeat
from meliad_rec.archs.window import WindowLayer
from meliad_rec.layers import positions
from meliad_rec.layers.dropout import TiledDropout
from meliad_rec.layers.positions import AdaptiveSpan
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell
from meliad_rec.training.train_step import auxiliary
from tests import cells
from tests.architectures import B
from tests.architectures import config
from tests.architectures import H
from tests.architectures import recurrent
from tests.architectures import S
from tests.architectures import staircase
from tests.architectures import W
from tests.architectures import windowed
from tests.cells import assert_close
from tests.cells import example
from tests.cells import forward


class Tag(Cell):
  """State: number of calls. Appends a digit to its input; has properties."""

  digit: int
  causal: bool = True
  needs_whole_document: bool = False
  is_recurrent: bool = False

  def initial_state(self, batch):
    return jnp.zeros(batch)

  def __call__(self, state, block):
    return state + 1, 10 * block.x + self.digit

  def memory_slots(self, state):
    if not self.is_recurrent:
      return None
    return state[:, None, None] + self.digit


ONES = Block(np.ones((B, 24, 1), np.float32), np.ones((B, 24), bool))


def tagged(count, places, scan=False):
  """Returns the cell and the digits that its layers append."""
  special = (lambda: Tag(digit=2)) if places else None
  cell = stack.layers(count, lambda: Tag(digit=1), special, places, scan)
  _, y = cell.apply({}, ONES.replace(x=0 * ONES.x), method=forward)
  return cell, int(y[0, 0, 0])


@pytest.mark.parametrize('scan', [False, True])
def test_special_layers_stand_where_they_should(scan):
  for places, digits in ((), 11111), ((-3,), 11211), ((0, -1), 21112):
    assert tagged(5, places, scan)[1] == digits


def test_neighbours_that_are_alike_are_scanned():
  cell, _ = tagged(6, (-2,), scan=True)
  kinds = [type(c).__name__ for c in cell.cells]
  assert kinds == ['Repeat', 'Tag', 'Tag']
  assert cell.cells[0].count == 4


def test_block_length_and_setting_are_those_of_cells_that_have_blocks():
  assert windowed().block_length is None
  stairs = staircase()
  both = stack.Stack((*recurrent().cells, stairs, Repeat(stairs, 2)))
  assert both.block_length == 8
  assert recurrent().block_setting == 'WINDOW'
  assert both.block_setting == 'WINDOW and of WINDOW / PASSES'


def test_layers_may_share_one_position_table():
  def tables(**shared):
    make = functools.partial(WindowLayer, config())
    params = cells.shapes(stack.layers(3, make, **shared))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [a.shape for path, a in leaves if 'table' in str(path)]

  assert tables() == 3 * [(H, 32)]
  assert tables(position=functools.partial(positions.T5Bias, H)) == [(H, 32)]


def test_one_cell_decides_for_the_stack_and_for_its_repeats():
  opposite = {
    'causal': False,
    'needs_whole_document': True,
    'is_recurrent': True,
  }
  plain, other = Tag(1), Tag(2, **opposite)
  properties = lambda cell: {name: getattr(cell, name) for name in opposite}
  assert properties(stack.Stack((plain, other))) == opposite
  assert properties(Repeat(other, 2)) == opposite
  for cell in stack.Stack((plain, plain)), Repeat(plain, 2):
    assert properties(cell) == {name: not v for name, v in opposite.items()}


def test_memory_slots_are_those_of_the_highest_cell_that_recurs():
  a, b = Tag(1, is_recurrent=True), Tag(2)
  c = Repeat(Tag(3, is_recurrent=True), 2)

  def slots(*cells):
    """The state of cell i is 10 i, and in the last repeat 5 more."""
    states = [10 * i + np.zeros(B) for i in range(len(cells))]
    states = [
      np.stack([s, s + 5], 1) if cell is c else s
      for cell, s in zip(cells, states, strict=True)
    ]
    return stack.Stack(cells).apply({}, tuple(states), method='memory_slots')

  np.testing.assert_array_equal(slots(a, b, c, b), np.full((B, 1, 1), 28))
  np.testing.assert_array_equal(slots(a, b), np.full((B, 1, 1), 1))
  assert slots(b) is None


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
  'mixed': lambda rate: stack.layers(
    6, Double, lambda: Double(), (2,), scan=True, layer_drop=rate
  ),
}


@pytest.mark.parametrize('kind', DOUBLES)
def test_layers_are_left_out_each_by_itself(kind):
  cell = DOUBLES[kind](0.3)
  params = {'params': cells.initial(cell, ONES)}

  def used(key):
    rngs = {'dropout': key} if key is not None else {}
    state, y = cell.apply(params, ONES, method=forward, rngs=rngs)
    return state, jnp.log2(y)

  keys = jax.random.split(jax.random.key(1), 1000)
  state, y = jax.jit(jax.vmap(used))(keys)
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

  def loss(params):
    rngs = {'dropout': jax.random.key(3)}
    y = cell.apply({'params': params}, ONES, method=forward, rngs=rngs)[1]
    return y.mean(), y[0, 0, 0]

  grad = jax.jit(jax.grad(loss, has_aux=True))
  grads, doubled = grad(cells.initial(cell, ONES))
  grads = np.concatenate([g.ravel() for g in jax.tree.leaves(grads)])
  assert 0 < (grads == 0).sum() < 6
  assert 2.0 ** (grads != 0).sum() == doubled


def test_shared_repeats_are_a_loop():
  """Compares values and gradients; each repeat has its own decode state."""
  one, count = BlockRecurrentLayer(config(), S), 2

  def looped(params, block):
    def loop(cell, block):
      states, opened = [], []
      for _ in range(count):
        state, y_BTD = forward(cell, block)
        block = block.replace(x=y_BTD)
        states.append(state)
        opened.append(cell.to_decode_state(state))
      stacked = jax.tree.map(lambda *s: jnp.stack(s, 1), *states)
      return stacked, jax.tree.map(lambda *s: jnp.stack(s, 1), *opened), block.x

    params = {'params': params['cell']}
    *states, y_BTD = one.apply(params, block, method=loop)
    return floats((states[0], *states)), y_BTD

  def repeated(params, block):
    def read(cell, block):
      state, y_BTD = forward(cell, block)
      opened = cell.to_decode_state(state)
      return (cell.to_segment_state(opened), state, opened), y_BTD

    repeat = Repeat(one, count, share=True)
    states, y_BTD = repeat.apply({'params': params}, block, method=read)
    return floats(states), y_BTD

  floats = lambda tree: jax.tree.map(lambda a: a.astype(jnp.float32), tree)
  block = example(W)
  params = {'cell': cells.parameters(one, block)}
  assert_close(*(cells.outcome(f, params, block) for f in (repeated, looped)))


@pytest.mark.slow
def test_repeats_with_their_own_parameters_are_a_stack():
  count, flat = 3, windowed(3)
  repeat = Repeat(flat.cells[0].clone(), count)
  (own,) = cells.initial(repeat).values()
  assert all(a.shape[0] == count for a in jax.tree.leaves(own))
  # Each layer draws its own; a table of positions begins as that of ALiBi.
  for path, a in jax.tree_util.tree_leaves_with_path(own):
    assert a.ndim < 3 or path[-1].key == 'table' or np.ptp(a, 0).max() > 0
  layers = lambda tree, axis: tuple(
    jax.tree.map(lambda a, i=i: jnp.take(a, i, axis), tree)
    for i in range(count)
  )

  def stacked(params, block):
    params = {f'cells_{i}': p for i, p in enumerate(layers(params['cell'], 0))}
    return flat.apply({'params': params}, block, method=forward)

  def repeated(params, block):
    params = {'params': params}
    state, y_BTD = repeat.apply(params, block, method=forward)
    return layers(state, 1), y_BTD

  params = {'cell': own}
  floats = lambda run: (
    lambda p, b: jax.tree.map(lambda a: a.astype(jnp.float32), run(p, b))
  )
  assert_close(
    *(cells.outcome(floats(f), params, example()) for f in (repeated, stacked))
  )


def test_a_staircase_of_one_chunk_is_its_layers_repeated():
  """The Ladder, a staircase of forward size 0 (Ju et al. 2021)."""
  block = example(W // 4)
  ladder = Repeat(windowed(2, include_self=True), 4, share=True)
  params = cells.parameters(ladder, block)
  # A staircase has one table of biases for all layers.
  table = np.float32(np.random.default_rng(0).normal(size=(H, 32)))
  steps = {'position': {'table': table}}
  for i, repeated in enumerate(params['cell'].values()):
    attention = repeated['layer']['attention']
    attention['position']['table'] = table
    others = {name: a for name, a in attention.items() if name != 'position'}
    steps[f'layers_{i}'] = repeated['layer'] | {'attention': others}
  _, expected = cells.apply(ladder, params, block)
  assert_close(cells.apply(staircase(4), steps, block)[1], expected)
  _, cached = cells.apply(staircase(4, live=1), steps, block)
  assert np.abs(expected - cached).max() > 0.01


def test_the_program_does_not_grow_with_the_repeats():
  def size(count):
    cell = Repeat(windowed(1), count, share=True)
    apply = functools.partial(cell.apply, method=forward)
    text = str(jax.make_jaxpr(apply)({'params': params}, example()))
    return text.count(' = ')

  params = {'cell': cells.parameters(windowed(1))}
  assert size(2) == size(16)


class Drop(Cell):
  """State: none. Drops half of its inputs; sows a loss of 2."""

  @nn.compact
  def __call__(self, state, block):
    self.sow('losses', 'two', jnp.float32(2))
    return state, TiledDropout(0.5)(block.x)


def test_each_repeat_draws_its_own_dropout_and_what_they_share_costs_once():
  block = Block(np.ones((1, 64, 64), np.float32), np.ones((1, 64), bool))
  rngs = {'dropout': jax.random.key(0)}
  for share, total in (True, 2), (False, 4):
    repeat = Repeat(Drop(), 2, share=share)
    (_, y), sown = repeat.apply({}, (), block, rngs=rngs, mutable='losses')
    assert 0.7 < (y == 0).mean() < 0.8
    assert auxiliary(sown) == pytest.approx(total)


def test_adaptive_spans_of_shared_cells_cost_once():
  """The loss is 5e-7 nats per token of mean span of its one layer."""
  repeated = Repeat(windowed(1, span=AdaptiveSpan), 4, share=True)
  halves = lambda a: np.full(a.shape, 0.5, np.float32)
  params = jax.tree.map(halves, cells.shapes(repeated))

  def penalty(params):
    _, sown = repeated.apply(
      {'params': params}, example(), method=forward, mutable='losses'
    )
    return auxiliary(sown)

  value, grads = jax.jit(jax.value_and_grad(penalty))(params)
  assert value == pytest.approx(5e-7 * 0.5 * W)
  paths = jax.tree_util.tree_leaves_with_path(grads)
  (grad_H,) = [a for path, a in paths if 'ratio' in jax.tree_util.keystr(path)]
  np.testing.assert_allclose(grad_H, 5e-7 * W / len(grad_H), rtol=1e-5)


@pytest.mark.slow
def test_casting_before_the_scan_changes_no_gradient(monkeypatch):
  """The scan over layers stacks gradients of kernels in bfloat16."""
  repeat = Repeat(WindowLayer(config(dtype='bfloat16')), 3)
  block = example()
  params = cells.parameters(repeat, block)
  found = cells.outcome(repeat, params, block)
  hidden = params['cell']['layer']['mlp']['hidden']['kernel']
  sizes = ','.join(map(str, hidden.shape))

  def gradients_are_stacked_in(dtype):
    loss = lambda p: cells.apply(repeat, p, block)[1].sum().astype(jnp.float32)
    text = str(jax.make_jaxpr(jax.grad(loss))(params))
    return f'{dtype}[{sizes}] = convert_element_type' in text

  assert gradients_are_stacked_in('f32')
  monkeypatch.setattr(WindowLayer, 'cast_params', Cell.cast_params)
  assert not gradients_are_stacked_in('f32')
  expected = cells.outcome(repeat, params, block)
  jax.tree.map(np.testing.assert_array_equal, found, expected)
