"""The LSTM against a plain loop; initial values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.lstm import LSTM
from meliad_rec.metrics import metrics
from meliad_rec.metrics import pictures
from meliad_rec.models.cell import run
from tests import cells
from tests.architectures import B
from tests.architectures import D
from tests.cells import assert_close
from tests.cells import draw

T = 11


def apply(params, block, **options):
  method = lambda cell: run(cell, params['state'], block)
  return LSTM(D).apply({'params': params['params']}, method=method, **options)


def slow(params, block):
  """Computes the LSTM token by token, and each token gate by gate."""
  (c_BD, h_BD), p = params['state'], params['params']
  names = 'input_kernel', 'recurrence', 'gate_bias'
  of_gates = [*zip(*(jnp.split(p[n], 4, -1) for n in names), strict=True)]
  sigmoid, outputs = jax.nn.sigmoid, []
  for x_BD, mask_B in zip(block.x.swapaxes(0, 1), block.mask.T, strict=True):
    i, f, new, o = (
      x_BD @ of_input + h_BD @ of_hidden + bias
      for of_input, of_hidden, bias in of_gates
    )
    next_BD = sigmoid(f) * c_BD + sigmoid(i) * jnp.tanh(new)
    h_BD = jnp.where(mask_B[:, None], sigmoid(o) * jnp.tanh(next_BD), h_BD)
    c_BD = jnp.where(mask_B[:, None], next_BD, c_BD)
    outputs.append(h_BD)
  return (c_BD, h_BD), jnp.stack(outputs, 1)


@functools.cache
def given():
  """Parameters, and a state from before."""
  state = np.random.default_rng(2).normal(size=(2, B, D))
  state = tuple(np.float32(state))
  return {'params': cells.parameters(LSTM(D)), 'state': state}


def test_is_the_loop():
  """Compares values and gradients."""
  block = cells.example(T)
  assert_close(*(cells.outcome(f, given(), block) for f in (apply, slow)))


def test_gates_are_shown():
  block = cells.example(T)
  (_, y_BTD), sown = jax.jit(
    functools.partial(apply, mutable=pictures.COLLECTION)
  )(given(), block)
  before_BTD = np.concatenate([given()['state'][1][:, None], y_BTD[:, :-1]], 1)
  p = given()['params']
  z_BTF = block.x @ p['input_kernel'] + before_BTD @ p['recurrence']
  i, f, _, o = np.split(z_BTF + p['gate_bias'], 4, -1)
  shown = sown[pictures.COLLECTION]
  gates = {'token_write': i, 'token_keep': f, 'token_output': o}
  assert shown.keys() == gates.keys()
  for name, z in gates.items():
    assert_close(shown[name][0], 1 / (1 + np.exp(-z)))


def test_metrics_of_the_forget_gate():
  block = cells.example(T)
  shown, sown = (
    apply(given(), block, mutable=name)[1][name]
    for name in (pictures.COLLECTION, metrics.COLLECTION)
  )
  keep_BTD, real_BT = np.asarray(shown['token_keep'][0]), block.mask
  found = metrics.collect(sown)
  gate, spread = found['gate'], found['gate_spread']
  assert_close(gate.total / gate.count, keep_BTD[real_BT].mean())
  spread_B = [a[real].std() for a, real in zip(keep_BTD, real_BT, strict=True)]
  by_hand = np.average(spread_B, weights=real_BT.sum(1))
  assert_close(spread.total / spread.count, by_hand)


def test_first_gates_remember_and_kernels_keep_the_size():
  params = cells.initial(LSTM(D))
  bias_GD = params['gate_bias'].reshape(4, D)
  np.testing.assert_array_equal(bias_GD, np.eye(4)[1][:, None] * np.ones(D))
  for kernel_DD in np.split(params['recurrence'], 4, 1):
    np.testing.assert_allclose(kernel_DD @ kernel_DD.T, np.eye(D), atol=1e-5)
  deviation = params['input_kernel'].std()
  np.testing.assert_allclose(deviation, D**-0.5, rtol=0.1)


def test_dropout_is_of_what_enters():
  rngs, block = {'dropout': jax.random.key(0)}, cells.example(T)
  call = lambda block, **options: LSTM(D, dropout=0.5).apply(
    {'params': given()['params']}, given()['state'], block, **options
  )
  assert np.abs(call(block)[1] - call(block, rngs=rngs)[1]).max() > 1e-3
  empty = block.replace(x=np.zeros_like(block.x))
  np.testing.assert_array_equal(call(empty)[1], call(empty, rngs=rngs)[1])


@pytest.mark.parametrize('rate', [10.0, -0.1])
def test_a_share_of_inputs_that_cannot_be(rate):
  with pytest.raises(ValueError, match='dropout must .* Set DROPOUT'):
    cells.shapes(LSTM(D, dropout=rate))


def test_the_input_product_is_outside_of_the_scan():
  text = str(jax.make_jaxpr(apply)(given(), cells.example(T)))
  assert f'f32[{B},{T},{4 * D}] = dot_general' in text
  assert f'f32[{B},{4 * D}] = dot_general' in text
  assert text.count('= dot_general') == 2


def test_an_encoder_needs_attention_to_it():
  with pytest.raises(ValueError, match='options/encoder/transformer_lstm'):
    LSTM(D).init(jax.random.key(0), draw(B, T, D), None, method='source_kv')
