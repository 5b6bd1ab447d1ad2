"""The layer of a core against plain equations; its first weights; dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.layers import norms
from meliad_rec.layers.core_config import CoreConfig
from meliad_rec.layers.core_layer import CoreLayer
from meliad_rec.layers.core_layer import MLP
from meliad_rec.layers.experts import Experts
from tests import plain_core
from tests.architectures import core_config
from tests.architectures import D
from tests.architectures import F
from tests.architectures import S
from tests.cells import assert_close

B, T = 3, 6
KINDS = {
  'plain': (False, False),
  'gated': (False, True),
  'reading': (True, False),
  'both': (True, True),
}
kinds = pytest.mark.parametrize('kind', KINDS)


def example(dtype='float32'):
  """The stream, what is padding, memory, and what keys are made of."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  mask_BT = np.arange(T) < np.array([T, 2, 0])[:, None]
  return normal(B, T, D), mask_BT, normal(B, S, D), normal(B, T, D)


def layer(kind, causal=False, **changes):
  return CoreLayer(core_config(causal, **changes), *KINDS[kind])


def given(kind, dtype='float32'):
  x_BTD, mask_BT, memory_BSD, source_BTD = example(dtype)
  return x_BTD, mask_BT, memory_BSD if KINDS[kind][0] else None, source_BTD


@functools.cache
def parameters(kind):
  init = jax.jit(lambda rng: layer(kind).init(rng, *given(kind)))
  rng = np.random.default_rng(1)
  move = lambda a: np.float32(a + rng.normal(size=a.shape) * 0.2)
  return jax.tree.map(move, init(jax.random.key(0))['params'])


@kinds
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('own', [False, True])
def test_equals_plain_equations(kind, causal, own):
  """Eqs. 9 to 11; keys of the stream itself or of something else."""
  made, params = layer(kind, causal), parameters(kind)
  *inputs, source_BTD = given(kind)
  source_BTD = None if own else source_BTD
  y_BTD = made.apply({'params': params}, *inputs, source_BTD)
  assert_close(
    y_BTD, plain_core.layer(params, made.config, *inputs, source_BTD)
  )


@kinds
def test_gradients_of_all(kind):
  """Finite and not zero, in spite of a row without tokens."""
  x_BTD, *rest = given(kind)

  def loss(params, x_BTD):
    y_BTD = layer(kind).apply({'params': params}, x_BTD, *rest)
    return jnp.sum(jnp.sin(y_BTD))

  grad = jax.jit(jax.grad(loss, argnums=(0, 1)))
  for path, g in jax.tree.leaves_with_path(grad(parameters(kind), x_BTD)):
    assert np.isfinite(g).all() and np.abs(g).max() > 0, path


@kinds
def test_bfloat16(kind):
  """In and out, near to float32."""
  low = layer(kind, dtype='bfloat16')
  y_BTD = low.apply({'params': parameters(kind)}, *given(kind, jnp.bfloat16))
  expected = layer(kind).apply({'params': parameters(kind)}, *given(kind))
  assert y_BTD.dtype == jnp.bfloat16
  error = np.abs(y_BTD.astype(np.float32) - expected)
  assert 0 < error.mean() < 0.02


@pytest.mark.parametrize('kind', ['gated', 'both'])
def test_a_gate_that_is_shut_keeps_the_input(kind):
  """The base of the gate is the input, not what attention made of it."""
  params, inputs = parameters(kind), given(kind)
  bias = params['gate_mlp']['output']['bias']

  def with_bias(value):
    output = params['gate_mlp']['output'] | {'bias': np.full_like(bias, value)}
    gate = params['gate_mlp'] | {'output': output}
    y_BTD = layer(kind).apply({'params': params | {'gate_mlp': gate}}, *inputs)
    return np.asarray(y_BTD)

  np.testing.assert_allclose(with_bias(-100), inputs[0], atol=1e-6)
  plain = {k: v for k, v in params.items() if k != 'gate_mlp'}
  ungated = 'reading' if KINDS[kind][0] else 'plain'
  expected = layer(ungated).apply({'params': plain}, *inputs)
  assert_close(with_bias(100), expected)


def test_padding_is_not_read():
  x_BTD, mask_BT, _, _ = example()
  apply = functools.partial(
    layer('gated').apply, {'params': parameters('gated')}
  )
  other = apply(x_BTD + 3 * ~mask_BT[..., None], mask_BT)
  np.testing.assert_array_equal(other[mask_BT], apply(x_BTD, mask_BT)[mask_BT])


@pytest.mark.parametrize('reads', [False, True])
def test_memory_is_neither_missed_nor_ignored(reads):
  x_BTD, mask_BT, memory_BSD, _ = example()
  made = CoreLayer(core_config(), reads)
  given_ = 'no memory' if reads else 'memory slots'
  with pytest.raises(
    ValueError, match=f'is {reads}, .* is given {given_}; set'
  ):
    made.init(jax.random.key(0), x_BTD, mask_BT, None if reads else memory_BSD)


def first_weights(kind, d_model=60, mlp_dim=90):
  """Of a wide layer, and the sizes of the MLP."""
  config = CoreConfig(d_model, 2, 8, mlp_dim, True)
  shape = jnp.zeros((1, 2, d_model)), jnp.ones((1, 2), bool)
  memory = (jnp.zeros((1, 3, d_model)),) if KINDS[kind][0] else ()
  made = CoreLayer(config, *KINDS[kind])
  return jax.jit(made.init)(jax.random.key(0), *shape, *memory)['params']


@kinds
def test_first_kernels_are_those_of_the_authors_code_and_biases_are_0(kind):
  """Kernels of the MLP: Xavier's, but PyTorch's own in layers of TLB and GUTLB.

  Biases there have a deviation of 1e-6, and in layers of TLB and GUTLB numbers
  as large as those of kernels.
  """
  params, (D, F) = first_weights(kind), (60, 90)
  for name in ('mlp', 'gate_mlp') if KINDS[kind][1] else ('mlp',):
    for part, inputs in (('hidden', D), ('output', F)):
      bound = (6 / (D + F)) ** 0.5
      if KINDS[kind][0]:
        bound = inputs**-0.5
      found = params[name][part]
      assert 0.98 < np.abs(found['kernel']).max() / bound <= 1
      np.testing.assert_array_equal(found['bias'], 0)


def test_the_mlp_drops_before_its_activation_and_at_its_end():
  """Numbers that are dropped first are then activated as zeros are."""
  shift = lambda h: h + 5
  config = CoreConfig(D, 1, 2, F, True, activation=shift, dropout=0.5)
  n_BTD, _, _, _ = example()
  eye = np.eye(D, F, dtype=np.float32)
  params = {
    'hidden': {'kernel': 0 * eye, 'bias': np.full(F, 3, np.float32)},
    'output': {'kernel': eye.T, 'bias': np.zeros(D, np.float32)},
  }
  rngs = {'dropout': jax.random.key(0)}
  y_BTD = MLP(config, F).apply({'params': params}, n_BTD, rngs=rngs)
  # 0 or 2 * 3 behind the first; 5 more; 0 or twice as much behind the second.
  assert set(np.unique(y_BTD)) == {0.0, 10.0, 22.0}


def test_norm_and_activation_are_choices():
  """Seen where attention adds nothing."""
  x_BTD, mask_BT, _, _ = example()
  made = layer('plain', norm=norms.NoNorm, activation=jnp.sin)
  params = jax.jit(made.init)(jax.random.key(0), x_BTD, mask_BT)['params']
  assert set(params) == {'attention', 'mlp'}
  still = jax.tree.map(jnp.zeros_like, params['attention'])
  mlp = parameters('plain')['mlp']
  y_BTD = made.apply(
    {'params': {'attention': still, 'mlp': mlp}}, x_BTD, mask_BT
  )
  hidden = np.sin(plain_core.linear(mlp['hidden'], x_BTD))
  assert_close(y_BTD, x_BTD + plain_core.linear(mlp['output'], hidden))


@pytest.mark.parametrize('in_attention', [False, True])
def test_experts_are_of_attention_too_or_of_the_mlp_alone(in_attention):
  """Where alone, attention is that of a layer without experts."""
  x_BTD, mask_BT, _, _ = example()
  made = CoreLayer(core_config(), experts=Experts(4, 2, in_attention))
  params = jax.jit(made.init)(jax.random.key(0), x_BTD, mask_BT)['params']
  assert ('choice' in params['attention']) == in_attention
  assert 'choice' in params['mlp']
  _, sown = made.apply({'params': params}, x_BTD, mask_BT, mutable=['routes'])
  assert len(jax.tree.leaves(sown)) == 1 + in_attention
  if not in_attention:
    plain = parameters('plain')
    still = jax.tree.map(jnp.zeros_like, params['mlp'])
    zero_mlp = jax.tree.map(jnp.zeros_like, plain['mlp'])
    given_ = lambda mlp: {'params': plain | {'mlp': mlp}}
    y_BTD = made.apply(given_(still), x_BTD, mask_BT)
    expected = layer('plain', True).apply(given_(zero_mlp), x_BTD, mask_BT)
    assert_close(y_BTD, expected)
