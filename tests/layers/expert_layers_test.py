"""MLP and attention of experts against a sum over the experts of a token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.transformer import Layers
from meliad_rec.layers.core_attention import attend
from meliad_rec.layers.core_layer import CoreLayer
from meliad_rec.layers.experts import ExpertAttention
from meliad_rec.layers.experts import ExpertMLP
from meliad_rec.layers.experts import Experts
from tests import plain_core
from tests.architectures import core_config
from tests.architectures import D
from tests.architectures import F
from tests.architectures import H
from tests.architectures import K
from tests.cells import assert_close

B, T = 3, 6
MIX = Experts(5, 2)


def example():
  x_BTD = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
  return x_BTD, np.arange(T) < np.array([T, 4, 1])[:, None]


def weights(params, n_BTD):
  """Of each expert for each token, 0 for those that it did not choose."""
  p_BTE = jax.nn.softmax(n_BTD @ params['choice']['router']['kernel'])
  least_BT1 = jnp.sort(p_BTE)[..., -MIX.chosen :][..., :1]
  return jnp.where(p_BTE >= least_BT1, p_BTE, 0)


def test_mlp():
  n_BTD, _ = example()
  mlp = ExpertMLP(core_config(), MIX)
  params = jax.jit(mlp.init)(jax.random.key(0), n_BTD)['params']
  weight_BTE = weights(params, n_BTD)
  expected = 0
  for e in range(MIX.count):
    hidden = plain_core.gelu(n_BTD @ params['hidden']['kernel'][e])
    y_BTD = hidden @ params['output']['kernel'][e]
    expected += weight_BTE[..., e, None] * y_BTD
  assert_close(mlp.apply({'params': params}, n_BTD), expected)


@pytest.mark.parametrize('causal', [True, False])
def test_attention(causal):
  x_BTD, mask_BT = example()
  config = core_config(causal=causal)
  attention = ExpertAttention(config, MIX)
  params = jax.jit(attention.init)(jax.random.key(0), x_BTD, x_BTD, mask_BT)
  params = params['params']
  n_BTD = plain_core.norm(params['norm'], x_BTD)
  weight_BTE = weights(params, n_BTD)
  heads = lambda kernel: (n_BTD @ kernel).reshape(B, T, H, K)
  k_BTHK, v_BTHK = (heads(params[n]['kernel']) for n in ('key', 'value'))
  expected = x_BTD
  for e in range(MIX.count):
    q_BTHK = heads(params['query']['kernel'][e]) * K**-0.5
    y_BTHK = attend(config, config.position(H), q_BTHK, k_BTHK, v_BTHK, mask_BT)
    y_BTD = y_BTHK.reshape(B, T, -1) @ params['output']['kernel'][e]
    expected = expected + weight_BTE[..., e, None] * y_BTD
  found = attention.apply({'params': params}, x_BTD, x_BTD, mask_BT)
  seen_BT1 = mask_BT[..., None]
  assert_close(np.where(seen_BT1, found, 0), np.where(seen_BT1, expected, 0))


@pytest.mark.parametrize('by_row', [False, True])
def test_the_mlp_drops_hidden_units_and_at_its_end(by_row):
  """Before the activation, as the MLP does, for each expert by itself."""
  shift = lambda h: h + 5
  config = core_config(activation=shift, dropout=0.5, dropout_by_row=by_row)
  n_BTD = np.ones((B, T, D), np.float32)
  params = {
    # All are as likely, and so each of the two counts a half.
    'choice': {'router': {'kernel': np.zeros((D, 2), np.float32)}},
    'hidden': {'kernel': np.full((2, D, F), 3 / D, np.float32)},
    'output': {'kernel': np.stack([np.eye(F, D, dtype=np.float32)] * 2)},
  }
  apply = ExpertMLP(config, Experts(2, 2)).apply
  rngs = {'dropout': jax.random.key(0)}
  y_BTD = apply({'params': params}, n_BTD, rngs=rngs)
  # Of each 0 or 2 * 3, and 5; half of both; 0 or twice as much.
  expected = [0, 10, 16, 22]
  np.testing.assert_allclose(np.unique(np.round(y_BTD, 3)), expected)
  assert (np.abs(y_BTD[0] - y_BTD[1]).max() > 1) == by_row
  np.testing.assert_allclose(apply({'params': params}, n_BTD), 8, rtol=1e-5)


@pytest.mark.parametrize('by_row', [False, True])
def test_dropout_of_attention(by_row):
  x_BTD, mask_BT = example()
  made = lambda rate: ExpertAttention(
    core_config(attention_dropout=rate, dropout_by_row=by_row), MIX
  )
  init = jax.jit(made(0.0).init)
  params = init(jax.random.key(0), x_BTD, x_BTD, mask_BT)
  apply = lambda rate, rngs: made(rate).apply(
    params, x_BTD, x_BTD, mask_BT, rngs=rngs
  )
  dry, rngs = apply(0.0, {}), {'dropout': jax.random.key(0)}
  np.testing.assert_array_equal(apply(0.5, {}), dry)
  assert np.abs(apply(0.5, rngs) - dry).max() > 0.01


def test_layers_of_their_own_have_none():
  core = Layers(lambda: CoreLayer(core_config(), experts=MIX), 2)
  with pytest.raises(ValueError, match='leave out options/experts'):
    core.init(jax.random.key(0), *example())
