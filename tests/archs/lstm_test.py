"""The LSTM against a loop in NumPy; padding; initial values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs import stack
from meliad_rec.archs.lstm import LSTM
from meliad_rec.models.cell import Block
from meliad_rec.models.cell import run

B, T, D = 3, 11, 6
KERNELS = 'input_kernel', 'recurrence'

close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def example():
  rng = np.random.default_rng(0)
  x_BTD = rng.normal(size=(B, T, D)).astype(np.float32)
  mask_BT = np.ones((B, T), bool)
  mask_BT[1, T - 3 :] = False
  mask_BT[2, 4] = False
  return Block(x_BTD, mask_BT)


@functools.cache
def parameters():
  rng = np.random.default_rng(1)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32) * 0.6
  return {
    'input_kernel': draw(D, 4 * D),
    'recurrence': draw(D, 4 * D),
    'gate_bias': draw(4 * D),
  }


def first_state():
  rng = np.random.default_rng(2)
  return tuple(rng.normal(size=(2, B, D)).astype(np.float32))


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def slow(params, state, block):
  """Computes the LSTM token by token, in float64."""
  kernels = [np.split(params[k], 4, -1) for k in KERNELS]
  gates = list(zip(*kernels, np.split(params['gate_bias'], 4), strict=True))
  c_BD, h_BD = (a.astype(np.float64) for a in state)
  y_BTD = np.zeros((B, T, D))
  for b in range(B):
    for t in range(T):
      if block.mask[b, t]:
        i, f, new, o = (
          block.x[b, t] @ of_input + h_BD[b] @ of_hidden + bias
          for of_input, of_hidden, bias in gates
        )
        c_BD[b] = sigmoid(f) * c_BD[b] + sigmoid(i) * np.tanh(new)
        h_BD[b] = sigmoid(o) * np.tanh(c_BD[b])
      y_BTD[b, t] = h_BD[b]
  return (c_BD, h_BD), y_BTD


def apply(params, state, block, **options):
  return LSTM(D, **options).apply({'params': params}, state, block)


def test_is_the_loop():
  found = jax.jit(apply)(parameters(), first_state(), example())
  jax.tree.map(close, found, slow(parameters(), first_state(), example()))


def weighted(state, y_BTD, np=np):
  """Returns a loss that depends on every output and state."""
  (c_BD, h_BD), weights = state, np.cos(np.arange(T * D).reshape(T, D))
  return np.sum(y_BTD * weights) + np.sum(c_BD * h_BD**2)


@pytest.mark.parametrize('remat', ['none', 'full'])
def test_gradients_are_those_of_the_loop(remat):
  """Compares with central differences in a random direction per array."""
  cell, rng = LSTM(D, remat=remat), np.random.default_rng(3)

  def loss(params, state, x_BTD):
    block = example().replace(x=x_BTD)
    method = lambda c: run(c, state, block)
    return weighted(*cell.apply({'params': params}, method=method), jnp)

  at = parameters(), first_state(), example().x
  grads = jax.jit(jax.grad(loss, (0, 1, 2)))(*at)
  leaves, tree = jax.tree.flatten(at)
  for i, g in enumerate(jax.tree.leaves(grads)):
    direction = rng.normal(size=g.shape)

    def moved(by, i=i, direction=direction):
      there = [*leaves]
      there[i] = leaves[i] + by * direction
      params, state, x_BTD = jax.tree.unflatten(tree, there)
      return weighted(*slow(params, state, example().replace(x=x_BTD)))

    expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
    np.testing.assert_allclose(np.sum(g * direction), expected, rtol=1e-3)


def test_padding_leaves_the_state_alone():
  block = example().replace(mask=np.zeros((B, T), bool))
  state, y_BTD = apply(parameters(), first_state(), block)
  jax.tree.map(np.testing.assert_array_equal, state, first_state())
  np.testing.assert_array_equal(y_BTD[:, 0], y_BTD[:, -1])


def drawn(width):
  """Returns initial parameters."""
  cell = LSTM(width)
  block = Block(np.zeros((1, 1, width), np.float32), np.ones((1, 1), bool))
  method = lambda c: c(c.initial_state(1), block)
  return cell.init(jax.random.key(0), method=method)['params']


def test_begins_remembering():
  params = drawn(D)
  bias_GD = params['gate_bias'].reshape(4, D)
  np.testing.assert_array_equal(bias_GD.mean(1), [0, 1, 0, 0])
  assert bias_GD.sum() == D
  for kernel_DD in np.split(params['recurrence'], 4, 1):
    np.testing.assert_allclose(kernel_DD @ kernel_DD.T, np.eye(D), atol=1e-5)


def test_input_kernels_begin_with_the_variance_of_their_width():
  deviation = drawn(128)['input_kernel'].std()
  np.testing.assert_allclose(deviation, 128**-0.5, rtol=0.05)


def test_dropout_is_of_what_enters():
  rngs = {'dropout': jax.random.key(0)}
  call = functools.partial(
    LSTM(D, dropout=0.5).apply, {'params': parameters()}, first_state()
  )
  _, plain = call(example())
  _, dropped = call(example(), rngs=rngs)
  assert np.abs(plain - dropped).max() > 1e-3
  empty = example().replace(x=np.zeros((B, T, D), np.float32))
  np.testing.assert_array_equal(call(empty)[1], call(empty, rngs=rngs)[1])


def test_the_input_product_is_outside_of_the_scan():
  text = str(jax.make_jaxpr(apply)(parameters(), first_state(), example()))
  assert f'f32[{B},{T},{4 * D}] = dot_general' in text
  assert f'f32[{B},{4 * D}] = dot_general' in text
  assert text.count('= dot_general') == 2


def test_bfloat16_keeps_a_float32_state():
  state, y_BTD = apply(parameters(), first_state(), example(), dtype='bfloat16')
  assert [a.dtype for a in state] == [jnp.float32] * 2
  assert y_BTD.dtype == jnp.bfloat16
  _, exact = apply(parameters(), first_state(), example())
  np.testing.assert_allclose(y_BTD.astype('float32'), exact, atol=0.05)


def test_layers_are_stacked_without_residuals():
  cell = stack.layers(2, lambda: LSTM(D))
  params = {'cells_0': parameters(), 'cells_1': parameters()}
  states = first_state(), first_state()
  _, y_BTD = cell.apply({'params': params}, states, example())
  _, lower = apply(parameters(), first_state(), example())
  _, expected = apply(parameters(), first_state(), example().replace(x=lower))
  close(y_BTD, expected)
