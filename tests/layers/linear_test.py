"""Products of activations and weights."""

from functools import partial
from functools import wraps

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.distributed.partition import leaves_by_path
from meliad_rec.layers.encoder_layer import EncoderMLP
from meliad_rec.layers.gates import LSTMGate
from meliad_rec.layers.gates import Residual
from meliad_rec.layers.layer import FeedForward
from meliad_rec.layers.linear import dot_general
from meliad_rec.layers.linear import relu
from meliad_rec.layers.linear import with_cheap_gradient
from tests.architectures import encoder_config

# Shapes of x and w, and the width of the operand that a copy transposes.
SHAPES = {
  'to a wider': ((2, 3, 4), (4, 9), 4),
  'to a narrower': ((2, 3, 9), (9, 4), 4),
  'of heads': ((2, 3, 2, 5), (2, 5, 7), 7),
}


def contraction(x, w):
  axes = tuple(range(w.ndim - 1))
  return (tuple(a + 2 for a in axes), axes), ((), ())


def draws(shapes):
  keys = jax.random.split(jax.random.key(0), 3)
  x, w = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=False))
  return x, w, jax.random.normal(keys[2], (*x.shape[:2], w.shape[-1]))


@pytest.mark.parametrize('name', SHAPES)
def test_values_and_gradients_are_those_of_lax(name):
  x, w, g = draws(SHAPES[name][:2])
  numbers = contraction(x, w)
  y, back = jax.vjp(partial(dot_general, dimension_numbers=numbers), x, w)
  y2, back2 = jax.vjp(partial(lax.dot_general, dimension_numbers=numbers), x, w)
  np.testing.assert_array_equal(y, y2)
  for ours, expected in zip(back(g), back2(g), strict=True):
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name', SHAPES)
def test_the_gradient_of_weights_transposes_the_narrower_operand(name):
  *shapes, width = SHAPES[name]
  x, w, g = draws(shapes)
  _, back = jax.vjp(
    partial(dot_general, dimension_numbers=contraction(x, w)), x, w
  )
  equations = jax.make_jaxpr(back)(g).eqns
  _, product = (e for e in equations if e.primitive is lax.dot_general_p)
  first = product.invars[0].aval.shape
  assert int(np.prod(first[2:])) == width


def test_bfloat16_sums_in_float32():
  x, w, g = (a.astype(jnp.bfloat16) for a in draws(((2, 3, 4), (4, 9))))
  product = partial(
    dot_general,
    dimension_numbers=contraction(x, w),
    preferred_element_type=jnp.float32,
  )
  y, back = jax.vjp(product, x, w)
  assert y.dtype == jnp.float32
  assert [d.dtype for d in back(g.astype(y.dtype))] == [jnp.bfloat16] * 2


@pytest.mark.parametrize('name', ['layer', 'encoder', 'gate'])
def test_gradients_of_biases_are_sums_in_float32(name):
  """257 equal gradients have a sum that bfloat16 cannot hold."""
  residual = partial(Residual, use_bias=True)
  module = {
    'layer': FeedForward(7, 'bfloat16', residual, use_bias=True),
    'encoder': EncoderMLP(encoder_config(dtype='bfloat16'), 7),
    'gate': LSTMGate('bfloat16', use_bias=True),
  }[name]
  x_B1D = jax.random.normal(jax.random.key(0), (1, 1, 4), jnp.bfloat16)
  count = 1 if name == 'encoder' else 2  # Numbers of arguments.
  params = module.init(jax.random.key(1), *[x_B1D] * count)['params']

  @jax.jit
  def gradients(params, x_BTD):
    run = lambda p: module.apply({'params': p}, *[x_BTD] * count)
    y_BTD, back = jax.vjp(run, params)
    assert y_BTD.dtype == jnp.bfloat16
    found = leaves_by_path(back(jnp.ones_like(y_BTD))[0])
    return {k: g for k, g in found.items() if k.endswith('bias')}

  once = gradients(params, x_B1D)
  often = gradients(params, jnp.repeat(x_B1D, 257, 1))
  assert len(once) == (3 if name == 'gate' else 2)
  for k, g in once.items():
    np.testing.assert_allclose(often[k], 257 * g, rtol=1e-5)


def test_other_contractions_are_refused():
  x, w, _ = draws(((2, 3, 4), (4, 9)))
  with pytest.raises(ValueError, match='last axes'):
    dot_general(x, w.T, (((2,), (1,)), ((), ())))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_relu_equals_that_of_jax(dtype):
  x, g = jnp.array([[-2, -0.0, 0, 3, np.inf], [1, 2, 3, 4, 5]], dtype)
  y, pull = jax.vjp(relu, x)
  expected, expected_pull = jax.vjp(jax.nn.relu, x)
  np.testing.assert_array_equal(y, expected)
  np.testing.assert_array_equal(pull(g)[0], expected_pull(g)[0])
  # The backward pass needs only the output.
  (kept,) = jax.tree.leaves(pull)
  np.testing.assert_array_equal(kept, y)


def test_only_relu_is_replaced():
  wrapped = wraps(jax.nn.relu)(lambda x: jax.nn.relu(x))  # As gin does.
  assert with_cheap_gradient(jax.nn.relu) is relu
  assert with_cheap_gradient(wrapped) is relu
  for other in jax.nn.gelu, jax.nn.silu, jnp.tanh, lambda x: x:
    assert with_cheap_gradient(other) is other
