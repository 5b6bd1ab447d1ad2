"""Joins against equations 1 to 7 of Hutchins et al. 2022."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.layers import gates
from meliad_rec.metrics import metrics
from meliad_rec.metrics import pictures

B, S, D, C, F = 3, 4, 5, 2, 7


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def example(join):
  rng = np.random.default_rng(0)
  x_BSD = rng.normal(size=(B, S, D)).astype(np.float32)
  h_BSCF = rng.normal(size=(B, S, C, F)).astype(np.float32)
  params = jax.jit(join.init)(jax.random.key(0), x_BSD, h_BSCF)['params']
  # Every parameter far from its small first value.
  params = jax.tree.map(
    lambda a: rng.normal(size=a.shape).astype(np.float32), params
  )
  y_BSD = jax.jit(join.apply)({'params': params}, x_BSD, h_BSCF)
  return x_BSD, h_BSCF, params, y_BSD


def assert_shown(join, x_BSD, h_BSCF, params, keep, write):
  """The weights of the old value and of the new one, and their statistics."""
  collections = [pictures.COLLECTION, metrics.COLLECTION]
  _, sown = join.apply({'params': params}, x_BSD, h_BSCF, mutable=collections)
  for name, weight in ('state_keep', keep), ('state_write', write):
    [found_BSD] = sown[pictures.COLLECTION][name]
    np.testing.assert_allclose(
      found_BSD, np.broadcast_to(weight, (B, S, D)), rtol=1e-4
    )
  found = metrics.collect(sown[metrics.COLLECTION])
  mean = found['gate'].total / found['gate'].count
  np.testing.assert_allclose(mean, keep.mean(), rtol=1e-4)
  spread = found['gate_spread'].total / found['gate_spread'].count
  rows = keep.reshape(-1, keep.shape[-1] * (S if keep.ndim > 1 else 1))
  np.testing.assert_allclose(spread, rows.std(1).mean(), rtol=1e-4)


def linear(params, h_BSCF):
  y = np.einsum('bscf,cfd->bsd', h_BSCF, params['kernel'])
  return y + params.get('bias', 0)


@pytest.mark.parametrize(
  ('options', 'tanh'), [({}, False), ({'tanh': True, 'use_bias': True}, True)]
)
def test_fixed_gate(options, tanh):
  x, h, params, y = example(gates.FixedGate(**options))
  assert ('bias' in params['z']) == ('use_bias' in options)
  z = linear(params['z'], h)  # eq. 1
  z = np.tanh(z) if tanh else z
  g = sigmoid(params['gate'])  # eq. 2
  expected = x * g + z * (1 - g)  # eq. 3
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
  assert_shown(gates.FixedGate(**options), x, h, params, g, 1 - g)


def test_a_fixed_gate_keeps_more_at_first_if_told_so():
  x_BSD, h_BSCF, *_ = example(gates.FixedGate())
  start = lambda **options: gates.FixedGate(**options).init(
    jax.random.key(0), x_BSD, h_BSCF
  )
  gate_D, more_D = (
    start(**o)['params']['gate'] for o in ({}, {'keep_bias': 2.2})
  )
  np.testing.assert_allclose(more_D - gate_D, 2.2, rtol=1e-6)


def test_the_forget_gate_of_an_lstm_has_a_constant():
  x, h, params, y = example(gates.LSTMGate(keep_bias=3.0))
  f = sigmoid(linear(params['f'], h) + 3)
  rest = np.tanh(linear(params['z'], h)) * sigmoid(linear(params['i'], h) - 1)
  np.testing.assert_allclose(y, x * f + rest, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ('options', 'tanh'), [({}, True), ({'tanh': False, 'use_bias': True}, False)]
)
def test_lstm_gate(options, tanh):
  x, h, params, y = example(gates.LSTMGate(**options))
  assert ('bias' in params['z']) == ('use_bias' in options)
  z = linear(params['z'], h)
  z = np.tanh(z) if tanh else z  # eq. 4
  i = sigmoid(linear(params['i'], h) - 1)  # eq. 5
  f = sigmoid(linear(params['f'], h) + 1)  # eq. 6
  expected = x * f + z * i  # eq. 7
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
  assert_shown(gates.LSTMGate(**options), x, h, params, f, i)


def test_first_parameters():
  wide, h = jnp.zeros((1, 1, 300)), jnp.zeros((1, 1, 4, 50))
  first = lambda join: jax.jit(join.init)(jax.random.key(0), wide, h)['params']
  close = np.testing.assert_allclose
  lstm = first(gates.LSTMGate())
  close(lstm['i']['kernel'].std(), (0.1 / 200) ** 0.5, rtol=0.05)
  close(lstm['f']['bias'].std(), 0.1, rtol=0.2)
  close(lstm['z']['kernel'].std(), 200**-0.5, rtol=0.05)
  close(first(gates.FixedGate())['gate'].std(), 0.1, rtol=0.2)
  residual = first(gates.Residual(scale=0.25))['linear']['kernel']
  close(residual.std(), 200**-0.5 / 4, rtol=0.05)


@pytest.mark.parametrize('join', [gates.FixedGate, gates.LSTMGate])
def test_a_gate_sums_in_float32_whatever_the_activations(join):
  """With the same bfloat16 inputs, only the output is rounded."""
  rng = np.random.default_rng(0)
  x, h = (jnp.asarray(rng.normal(size=(B, S, n)), 'bfloat16') for n in (64, 96))
  params = jax.jit(join('bfloat16').init)(jax.random.key(0), x, h)
  assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype('float32')}
  params = jax.tree.map(
    lambda a: a.astype('bfloat16').astype('float32'), params
  )
  found = jax.jit(join('bfloat16').apply)(params, x, h)
  assert found.dtype == jnp.bfloat16
  x, h = x.astype('float32'), h.astype('float32')
  exact = jax.jit(join('float32').apply)(params, x, h)
  assert (found == exact.astype('bfloat16')).mean() > 0.99
