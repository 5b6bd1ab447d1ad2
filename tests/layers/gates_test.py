"""Joins against equations 1 to 7 of Hutchins et al. 2022."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.layers import gates
from meliad_rec.layers.dropout import LockedDropout

B, S, D, C, F = 3, 4, 5, 2, 7


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def example(join):
  rng = np.random.default_rng(0)
  x_BSD = rng.normal(size=(B, S, D)).astype(np.float32)
  h_BSCF = rng.normal(size=(B, S, C, F)).astype(np.float32)
  params = join.init(jax.random.key(0), x_BSD, h_BSCF)['params']
  # Every parameter far from its small first value.
  params = jax.tree.map(
    lambda a: rng.normal(size=a.shape).astype(np.float32), params
  )
  return x_BSD, h_BSCF, params, join.apply({'params': params}, x_BSD, h_BSCF)


def linear(params, h_BSCF):
  y = np.einsum('bscf,cfd->bsd', h_BSCF, params['kernel'])
  return y + params.get('bias', 0)


def test_residual():
  x, h, params, y = example(gates.Residual())
  np.testing.assert_allclose(y, x + linear(params['linear'], h), rtol=1e-4)


def test_a_residual_may_begin_smaller():
  x, h = jnp.zeros((1, 1, 9)), jnp.zeros((1, 1, 4, 50))
  first = lambda **options: gates.Residual(use_bias=True, **options).init(
    jax.random.key(0), x, h
  )['params']['linear']
  np.testing.assert_allclose(
    first(scale=0.25)['kernel'], first()['kernel'] / 4, rtol=1e-5
  )
  np.testing.assert_allclose(first()['kernel'].std(), 200**-0.5, rtol=0.1)


def test_a_residual_may_drop_the_same_at_all_tokens():
  x, h = jnp.zeros((B, S, D)), jnp.ones((B, S, F))
  join = gates.Residual(rate=0.5, dropout=LockedDropout)
  params = join.init(jax.random.key(0), x, h)
  dropped = lambda T: np.asarray(
    join.apply(params, x[:, :T], h[:, :T], rngs={'dropout': jax.random.key(1)})
  )
  one = np.repeat(dropped(1), S, 1)
  np.testing.assert_allclose(dropped(S), one, rtol=1e-6)
  assert 0 < (dropped(1) == 0).mean() < 1


@pytest.mark.parametrize('tanh', [False, True])
@pytest.mark.parametrize('use_bias', [False, True])
def test_fixed_gate(tanh, use_bias):
  join = gates.FixedGate(tanh=tanh, use_bias=use_bias)
  x, h, params, y = example(join)
  assert ('bias' in params['z']) == use_bias
  z = linear(params['z'], h)  # eq. 1
  z = np.tanh(z) if tanh else z
  g = sigmoid(params['gate'])  # eq. 2
  expected = x * g + z * (1 - g)  # eq. 3
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('tanh', [False, True])
def test_lstm_gate(tanh):
  x, h, params, y = example(gates.LSTMGate(tanh=tanh))
  z = linear(params['z'], h)
  z = np.tanh(z) if tanh else z  # eq. 4
  i = sigmoid(linear(params['i'], h) - 1)  # eq. 5
  f = sigmoid(linear(params['f'], h) + 1)  # eq. 6
  expected = x * f + z * i  # eq. 7
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_tanh_by_default_as_in_the_paper():
  assert not gates.FixedGate().tanh
  assert gates.LSTMGate().tanh


def test_first_parameters():
  wide = jnp.zeros((1, 1, 300))
  h = jnp.zeros((1, 1, 200))
  params = gates.LSTMGate().init(jax.random.key(0), wide, h)['params']
  np.testing.assert_allclose(
    params['i']['kernel'].std(), (0.1 / 200) ** 0.5, rtol=0.05
  )
  np.testing.assert_allclose(params['f']['bias'].std(), 0.1, rtol=0.2)
  np.testing.assert_allclose(params['z']['kernel'].std(), 200**-0.5, rtol=0.05)
  fixed = gates.FixedGate().init(jax.random.key(0), wide, h)['params']
  np.testing.assert_allclose(fixed['gate'].std(), 0.1, rtol=0.2)


@pytest.mark.parametrize(
  'join', [gates.Residual, gates.FixedGate, gates.LSTMGate]
)
def test_the_stream_keeps_its_dtype(join):
  x, h = jnp.ones((B, S, D), 'bfloat16'), jnp.ones((B, S, F), 'bfloat16')
  y, params = join(dtype='bfloat16').init_with_output(jax.random.key(0), x, h)
  assert y.dtype == jnp.bfloat16
  assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(params))


def test_a_gate_sums_in_float32_whatever_the_activations():
  """With the same bfloat16 inputs, only the output is rounded."""
  rng = np.random.default_rng(0)
  x, h = (jnp.asarray(rng.normal(size=(B, S, n)), 'bfloat16') for n in (64, 96))
  low, high = gates.LSTMGate('bfloat16'), gates.LSTMGate('float32')
  params = low.init(jax.random.key(0), x, h)
  params = jax.tree.map(
    lambda a: a.astype('bfloat16').astype('float32'), params
  )
  exact = high.apply(params, x.astype('float32'), h.astype('float32'))
  rounded = exact.astype('bfloat16').astype('float32')
  found = low.apply(params, x, h).astype('float32')
  assert (found == rounded).mean() > 0.99
