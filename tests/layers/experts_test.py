"""Experts: choice, sorting, balance; MLP and attention of experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs.transformer import EncoderLayers
from meliad_rec.layers import experts
from meliad_rec.layers.attention import attend
from meliad_rec.layers.encoder_layer import EncoderLayer
from meliad_rec.layers.experts import ExpertAttention
from meliad_rec.layers.experts import ExpertMLP
from meliad_rec.layers.experts import Experts
from meliad_rec.layers.experts import Grouped
from meliad_rec.layers.experts import Router
from tests import plain_encoder
from tests.architectures import D as LAYERS_D
from tests.architectures import encoder_config
from tests.architectures import F
from tests.architectures import H
from tests.architectures import K
from tests.cells import assert_close

B, T, D, E, C, Y = 3, 5, 7, 6, 2, 4
MIX = Experts(E, C)


def example():
  return np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)


def choose(n_BTD):
  router = Router(MIX)
  params = router.init(jax.random.key(0), n_BTD)['params']
  p_BTE, sown = router.apply({'params': params}, n_BTD, mutable=['routes'])
  np.testing.assert_array_equal(p_BTE, sown['routes']['p'][0])
  return experts.choose(p_BTE, C), np.asarray(p_BTE)


def test_each_token_is_mixed_of_its_likeliest_experts():
  n_BTD = example()
  chosen, p_BTE = choose(n_BTD)
  kernels = Grouped(E, Y, 'float32', experts.fan_in(1.0))
  kernel_EDY, _ = kernels.init_with_output(jax.random.key(1), D)
  y_MY = experts.grouped(chosen.spread(n_BTD), kernel_EDY, chosen.size_E)
  found_BTY = chosen.mix(y_MY)
  for b, t in np.ndindex(B, T):
    likeliest = np.argsort(-p_BTE[b, t])[:C]
    expected_Y = sum(
      p_BTE[b, t, e] * n_BTD[b, t] @ kernel_EDY[e] for e in likeliest
    )
    np.testing.assert_allclose(found_BTY[b, t], expected_Y, atol=1e-6)


def test_gather_undoes_sort():
  chosen, _ = choose(example())
  x_BTCY = np.random.default_rng(1).normal(size=(B, T, C, Y))
  np.testing.assert_array_equal(
    chosen.gather(chosen.sort(jnp.asarray(x_BTCY))), x_BTCY.astype(np.float32)
  )
  assert int(chosen.size_E.sum()) == B * T * C


def test_only_tokens_that_took_a_step_count():
  p_BTE = jax.nn.softmax(np.random.default_rng(2).normal(size=(B, T, E)))
  taken_BT = np.arange(B * T).reshape(B, T) % 3 == 0
  (found,) = experts.routes({'p': (p_BTE,)}, jnp.asarray(taken_BT))
  p_NE = np.asarray(p_BTE)[taken_BT]
  entropy = -(p_NE * np.log(p_NE)).sum(1).mean()
  mean_E = p_NE.mean(0)
  expected = entropy + (mean_E * np.log(mean_E)).sum()
  np.testing.assert_allclose(
    experts.mean_imbalance([found, found]), expected, atol=1e-6
  )


def test_imbalance_is_least_where_tokens_are_sure_and_experts_alike():
  even_E = jnp.full(E, 1 / E)
  np.testing.assert_allclose(experts.imbalance(even_E, 0.0), -np.log(E), 1e-6)
  one_E = jnp.eye(E)[2]
  assert experts.imbalance(one_E, 0.0) == 0


def test_first_weights_have_the_variance_of_their_own_inputs():
  drawn = experts.fan_in(0.5)(jax.random.key(0), (3, 400, 50))
  np.testing.assert_allclose(drawn.var(), 0.5 / 400, rtol=0.02)


def test_settings_are_checked():
  with pytest.raises(ValueError, match='CHOSEN'):
    Experts(6, 7)
  with pytest.raises(ValueError, match='EXPERT_BALANCE'):
    Experts(6, 2, balance=-1)


LAYERS_T = 6
LAYERS_MIX = Experts(5, 2)


def layers_example():
  x_BTD = (
    np.random.default_rng(0)
    .normal(size=(B, LAYERS_T, LAYERS_D))
    .astype(np.float32)
  )
  return x_BTD, np.arange(LAYERS_T) < np.array([LAYERS_T, 4, 1])[:, None]


def weights(params, n_BTD):
  """Returns the weight of each expert for each token, 0 if not chosen."""
  p_BTE = jax.nn.softmax(n_BTD @ params['choice']['router']['kernel'])
  least_BT1 = jnp.sort(p_BTE)[..., -LAYERS_MIX.chosen :][..., :1]
  return jnp.where(p_BTE >= least_BT1, p_BTE, 0)


def test_mlp():
  n_BTD, _ = layers_example()
  mlp = ExpertMLP(encoder_config(), LAYERS_MIX)
  params = jax.jit(mlp.init)(jax.random.key(0), n_BTD)['params']
  weight_BTE = weights(params, n_BTD)
  expected = 0
  for e in range(LAYERS_MIX.count):
    hidden = plain_encoder.gelu(n_BTD @ params['hidden']['kernel'][e])
    y_BTD = hidden @ params['output']['kernel'][e]
    expected += weight_BTE[..., e, None] * y_BTD
  assert_close(mlp.apply({'params': params}, n_BTD), expected)


@pytest.mark.parametrize('causal', [True, False])
def test_attention(causal):
  x_BTD, mask_BT = layers_example()
  config = encoder_config(causal=causal)
  attention = ExpertAttention(config, LAYERS_MIX)
  params = jax.jit(attention.init)(jax.random.key(0), x_BTD, x_BTD, mask_BT)
  params = params['params']
  n_BTD = plain_encoder.norm(params['norm'], x_BTD)
  weight_BTE = weights(params, n_BTD)
  heads = lambda kernel: (n_BTD @ kernel).reshape(B, LAYERS_T, H, K)
  k_BTHK, v_BTHK = (heads(params[n]['kernel']) for n in ('key', 'value'))
  expected = x_BTD
  for e in range(LAYERS_MIX.count):
    q_BTHK = heads(params['query']['kernel'][e]) * K**-0.5
    y_BTHK = attend(
      *(config.position(H), q_BTHK, k_BTHK, v_BTHK, mask_BT), causal=causal
    )
    y_BTD = y_BTHK.reshape(B, LAYERS_T, -1) @ params['output']['kernel'][e]
    expected = expected + weight_BTE[..., e, None] * y_BTD
  found = attention.apply({'params': params}, x_BTD, x_BTD, mask_BT)
  seen_BT1 = mask_BT[..., None]
  assert_close(np.where(seen_BT1, found, 0), np.where(seen_BT1, expected, 0))


@pytest.mark.parametrize('by_row', [False, True])
def test_the_mlp_drops_hidden_units_and_at_its_end(by_row):
  """Dropout precedes the activation, separately for each expert."""
  shift = lambda h: h + 5
  config = encoder_config(activation=shift, dropout=0.5, dropout_by_row=by_row)
  n_BTD = np.ones((B, LAYERS_T, LAYERS_D), np.float32)
  params = {
    # All are as likely, and so each of the two counts a half.
    'choice': {'router': {'kernel': np.zeros((LAYERS_D, 2), np.float32)}},
    'hidden': {'kernel': np.full((2, LAYERS_D, F), 3 / LAYERS_D, np.float32)},
    'output': {'kernel': np.stack([np.eye(F, LAYERS_D, dtype=np.float32)] * 2)},
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
  x_BTD, mask_BT = layers_example()
  made = lambda rate: ExpertAttention(
    encoder_config(attention_dropout=rate, dropout_by_row=by_row), LAYERS_MIX
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
  encoder = EncoderLayers(
    lambda: EncoderLayer(encoder_config(), experts=LAYERS_MIX), 2
  )
  with pytest.raises(ValueError, match='options/layer/experts'):
    encoder.init(jax.random.key(0), *layers_example())
