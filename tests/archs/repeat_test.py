"""Repeats equal loops, with shared or separate parameters."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.stack import Repeat
from meliad_rec.layers.dropout import TiledDropout
from meliad_rec.layers.positions import AdaptiveSpan
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import Cell
from meliad_rec.models.cell import run
from meliad_rec.training.train_step import auxiliary
from tests.architectures import B
from tests.architectures import D
from tests.architectures import H
from tests.architectures import recurrent
from tests.architectures import staircase
from tests.architectures import T
from tests.architectures import W
from tests.architectures import windowed

COUNT = 2
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
REPEATED = {
  'window': lambda: windowed(1),
  'recurrent': lambda: recurrent(1, (0,)),
}


def example():
  rng = np.random.default_rng(0)
  x_BTD = rng.normal(size=(B, T, D)).astype(np.float32)
  return Block(x_BTD, rng.random((B, T)) < 0.9)


def forward(cell, block):
  return run(cell, cell.initial_state(B), block)


@functools.cache
def parameters(name):
  repeated = REPEATED[name]()
  init = jax.jit(functools.partial(repeated.init, method=forward))
  return init(jax.random.key(0), example())['params']


def looped(repeated, block):
  """Runs the cell repeatedly, each time with its own state."""
  states = []
  for _ in range(COUNT):
    state, y_BTD = forward(repeated, block)
    block = block.replace(x=y_BTD)
    states.append(state)
  return jax.tree.map(lambda *s: jnp.stack(s, 1), *states), block.x


def outcome(cell, params, method):
  def loss(params):
    state, y_BTD = cell.apply({'params': params}, example(), method=method)
    return jnp.sum(jnp.sin(y_BTD)), (state, y_BTD)

  return jax.jit(jax.grad(loss, has_aux=True))(params)


@pytest.mark.parametrize(
  'name', ['window', pytest.param('recurrent', marks=pytest.mark.slow)]
)
def test_is_the_loop_in_values_and_gradients(name):
  params = parameters(name)
  repeated = Repeat(REPEATED[name](), COUNT, share=True)
  grads, (state, y) = outcome(repeated, {'cell': params}, forward)
  expected_grads, (expected_state, expected) = outcome(
    REPEATED[name](), params, looped
  )
  close(y, expected)
  jax.tree.map(close, state, expected_state)
  jax.tree.map(close, grads['cell'], expected_grads)


def test_open_and_close_reach_every_repeat():
  name = 'recurrent'
  repeated, params = (
    Repeat(REPEATED[name](), COUNT, share=True),
    parameters(name),
  )
  apply = functools.partial(repeated.apply, {'params': {'cell': params}})
  state, _ = apply(example(), method=forward)
  opened = apply(state, method='to_decode_state')
  for i in range(COUNT):
    one = REPEATED[name]().apply(
      {'params': params},
      jax.tree.map(lambda a, i=i: a[:, i], state),
      method='to_decode_state',
    )
    jax.tree.map(lambda a, b, i=i: close(a[:, i], b), opened, one)
  closed = apply(opened, method='to_segment_state')
  jax.tree.map(close, closed, state)


def test_the_summary_is_that_of_the_last_repeat():
  apply = functools.partial(
    Repeat(REPEATED['recurrent'](), COUNT, share=True).apply,
    {'params': {'cell': parameters('recurrent')}},
  )
  state = apply(B, method='initial_state')
  ((past, states),) = state
  states = states.at[:, -1].set(7)
  summary = apply(((past, states),), method='memory_slots')
  np.testing.assert_array_equal(summary, np.full((B, *states.shape[2:]), 7))


class Opposite(Cell):
  """Cell that is not causal and needs a whole document."""

  causal = False
  needs_whole_document = True


def test_what_holds_for_the_cell_holds_for_its_repeats():
  repeated = Repeat(windowed(), COUNT)
  assert repeated.causal and not repeated.needs_whole_document
  repeated = Repeat(Opposite(), COUNT)
  assert not repeated.causal and repeated.needs_whole_document


def test_parameters_and_program_do_not_grow_with_the_repeats():
  def sizes(count):
    cell = Repeat(windowed(), count, share=True)
    init = functools.partial(cell.init, method=forward)
    params = jax.eval_shape(init, jax.random.key(0), example())
    apply = functools.partial(cell.apply, method=forward)
    text = str(jax.make_jaxpr(apply)(params, example()))
    return sum(a.size for a in jax.tree.leaves(params)), text.count(' = ')

  assert sizes(2) == sizes(16)


class Drop(Cell):
  """State: none. Drops half of its inputs."""

  @nn.compact
  def __call__(self, state, block):
    return state, TiledDropout(0.5)(block.x)


def test_each_repeat_draws_its_own_dropout():
  block = Block(np.ones((1, 64, 64), np.float32), np.ones((1, 64), bool))
  rngs = {'dropout': jax.random.key(0)}
  _, y = Repeat(Drop(), 2, share=True).apply({}, (), block, rngs=rngs)
  assert 0.7 < (y == 0).mean() < 0.8


class Loss(Cell):
  """State: none. Sows a loss of 2."""

  def __call__(self, state, block):
    self.sow('losses', 'two', jnp.float32(2))
    return state, block.x


@pytest.mark.parametrize('share, total', [(True, 2), (False, 6)])
def test_what_repeats_share_costs_once(share, total):
  block = Block(np.ones((B, 1, D), np.float32), np.ones((B, 1), bool))
  repeated = Repeat(Loss(), 3, share=share)
  _, sown = repeated.apply({}, (), block, mutable='losses')
  assert auxiliary(sown) == pytest.approx(total)


@pytest.mark.parametrize('count', [1, 4])
def test_adaptive_spans_of_shared_cells_cost_once(count):
  """The loss is 5e-7 nats per token of mean span of its one layer."""
  repeated = Repeat(windowed(1, span=AdaptiveSpan), count, share=True)
  init = jax.jit(functools.partial(repeated.init, method=forward))
  # Spans begin with 0, which costs nothing.
  params = jax.tree.map(
    lambda a: a + 0.5, init(jax.random.key(0), example())['params']
  )

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


def test_the_count_must_be_positive():
  with pytest.raises(ValueError, match='REPEATS'):
    Repeat(windowed(), 0, share=True).init(
      jax.random.key(0), example(), method=forward
    )


def unstacked(params, count):
  """Converts the parameters of a Repeat to those of a stack."""
  (inner,) = params.values()
  return {
    f'cells_{i}': jax.tree.map(lambda a, i=i: a[i], inner) for i in range(count)
  }


def test_repeat_is_the_stack_with_the_same_parameters():
  count = 3
  flat = windowed(count)
  repeat = Repeat(flat.cells[0].clone(), count)
  init = jax.jit(functools.partial(repeat.init, method=forward))
  params = init(jax.random.key(0), example())['params']
  assert all(a.shape[0] == count for a in jax.tree.leaves(params))
  # Each layer draws its own.
  assert all(
    np.ptp(a, 0).max() > 0 for a in jax.tree.leaves(params) if a.ndim > 2
  )

  def outcome(cell, params):
    def loss(params):
      state, y = cell.apply({'params': params}, example(), method=forward)
      return jnp.sum(jnp.sin(y)), (state, y)

    return jax.jit(jax.grad(loss, has_aux=True))(params)

  grads, (states, y) = outcome(repeat, params)
  flat_grads, (flat_states, flat_y) = outcome(flat, unstacked(params, count))
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
  close(y, flat_y)
  jax.tree.map(close, unstacked(grads, count), flat_grads)
  for i, state in enumerate(flat_states):
    jax.tree.map(lambda a, b: close(a[:, i], b), states, state)


def test_a_staircase_of_one_chunk_is_its_layers_repeated():
  """The Ladder, a staircase of forward size 0 (Ju et al. 2021)."""
  rng = np.random.default_rng(0)
  x_BCD = rng.normal(size=(B, W // 4, D)).astype(np.float32)
  block = Block(x_BCD, rng.random(x_BCD.shape[:2]) < 0.9)
  ladder = Repeat(windowed(2, include_self=True), 4, share=True)
  params = ladder.init(jax.random.key(0), block, method=forward)['params']
  # A staircase has one table of biases for all layers.
  table = rng.normal(size=(H, 32)).astype(np.float32)
  steps = {'position': {'table': table}}
  for i, repeated in enumerate(params['cell'].values()):
    attention = repeated['layer']['attention']
    attention['position']['table'] = table
    others = {name: a for name, a in attention.items() if name != 'position'}
    steps[f'layers_{i}'] = repeated['layer'] | {'attention': others}
  read = lambda cell, params: cell.apply(
    {'params': params}, block, method=forward
  )
  expected = read(ladder, params)[1]
  close(read(staircase(4), steps)[1], expected)
  assert np.abs(expected - read(staircase(4, live=1), steps)[1]).max() > 0.01
