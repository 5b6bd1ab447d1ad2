"""Experts: balance, MLP and attention of experts, and their dropout."""

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
from tests import plain_encoder
from tests.architectures import D
from tests.architectures import encoder_config
from tests.architectures import F
from tests.architectures import H
from tests.architectures import K
from tests.cells import assert_close
from tests.cells import draw

B, T = 3, 6
MIX = Experts(5, 2)


def example():
  x_BTD = jnp.asarray(draw(B, T, D))
  return x_BTD, np.arange(T) < np.array([T, 4, 1])[:, None]


def test_only_tokens_that_took_a_step_count():
  p_BTE = np.asarray(jax.nn.softmax(draw(B, T, 5)))
  taken_BT = np.arange(B * T).reshape(B, T) % 3 == 0
  (found,) = experts.routes({'p': (p_BTE,)}, jnp.asarray(taken_BT))
  p_NE = p_BTE[taken_BT]
  entropy = -(p_NE * np.log(p_NE)).sum(1).mean()
  mean_E = p_NE.mean(0)
  expected = entropy + (mean_E * np.log(mean_E)).sum()
  np.testing.assert_allclose(
    experts.mean_imbalance([found, found]), expected, atol=1e-6
  )


def test_the_imbalance_has_gradients_at_probabilities_of_0():
  far_BTE = np.array([[[0, -150, 1], [1, -150, 0]]], np.float32)  # exp is 0.

  def loss(logits_BTE, taken_BT):
    p_BTE = jax.nn.softmax(logits_BTE)
    return experts.mean_imbalance(experts.routes({'p': (p_BTE,)}, taken_BT))

  for taken in True, False:
    found_BTE = jax.grad(loss)(far_BTE, jnp.full((1, 2), taken))
    near_BTE = jax.grad(loss)(far_BTE[..., ::2], jnp.full((1, 2), taken))
    assert_close(found_BTE[..., ::2], near_BTE)
    assert_close(found_BTE[..., 1], np.zeros((1, 2)))


def test_first_weights_have_the_variance_of_their_own_inputs():
  drawn = experts.fan_in(0.5)(jax.random.key(0), (3, 400, 50))
  np.testing.assert_allclose(drawn.var(), 0.5 / 400, rtol=0.02)


def test_settings_are_checked():
  with pytest.raises(ValueError, match='CHOSEN'):
    Experts(6, 7)
  with pytest.raises(ValueError, match='EXPERT_BALANCE'):
    Experts(6, 2, balance=-1)


def run(module, *inputs):
  """Returns parameters, outputs, and what the router sowed."""
  params = jax.jit(module.init)(jax.random.key(0), *inputs)['params']
  apply = jax.jit(lambda p: module.apply(p, *inputs, mutable=['routes']))
  y_BTD, sown = apply({'params': params})
  return params, y_BTD, *jax.tree.leaves(sown)


def weights(params, n_BTD):
  """Returns p_BTE, and the weight of each expert, 0 if not chosen."""
  p_BTE = jax.nn.softmax(n_BTD @ params['choice']['router']['kernel'])
  least_BT1 = jnp.sort(p_BTE)[..., -MIX.chosen :][..., :1]
  return p_BTE, jnp.where(p_BTE >= least_BT1, p_BTE, 0)


def test_mlp():
  n_BTD, _ = example()
  params, found, sown_BTE = run(ExpertMLP(encoder_config(), MIX), n_BTD)
  p_BTE, weight_BTE = weights(params, n_BTD)
  expected = 0
  for e in range(MIX.count):
    hidden = plain_encoder.gelu(n_BTD @ params['hidden']['kernel'][e])
    y_BTD = hidden @ params['output']['kernel'][e]
    expected += weight_BTE[..., e, None] * y_BTD
  assert_close(found, expected)
  assert_close(sown_BTE, p_BTE)


@pytest.mark.parametrize('causal', [True, False])
def test_attention(causal):
  x_BTD, mask_BT = example()
  config = encoder_config(causal=causal)
  attention = ExpertAttention(config, MIX)
  params, found, sown_BTE = run(attention, x_BTD, x_BTD, mask_BT)
  n_BTD = plain_encoder.norm(params['norm'], x_BTD)
  p_BTE, weight_BTE = weights(params, n_BTD)
  heads = lambda kernel: (n_BTD @ kernel).reshape(B, T, H, K)
  k_BTHK, v_BTHK = (heads(params[n]['kernel']) for n in ('key', 'value'))
  expected = x_BTD
  for e in range(MIX.count):
    q_BTHK = heads(params['query']['kernel'][e]) * K**-0.5
    y_BTHK = attend(
      *(config.position(H), q_BTHK, k_BTHK, v_BTHK, mask_BT), causal=causal
    )
    y_BTD = y_BTHK.reshape(B, T, -1) @ params['output']['kernel'][e]
    expected = expected + weight_BTE[..., e, None] * y_BTD
  seen_BT1 = mask_BT[..., None]
  assert_close(np.where(seen_BT1, found, 0), np.where(seen_BT1, expected, 0))
  assert_close(sown_BTE, p_BTE)


@pytest.mark.parametrize('by_row', [False, True])
def test_the_mlp_drops_hidden_units_and_at_its_end(by_row):
  """Dropout precedes the activation, separately for each expert."""
  shift = lambda h: h + 5
  config = encoder_config(activation=shift, dropout=0.5, dropout_by_row=by_row)
  n_BTD = np.ones((B, T, D), np.float32)
  params = {
    # All are as likely, and so each of the two counts a half.
    'choice': {'router': {'kernel': np.zeros((D, 2), np.float32)}},
    'hidden': {'kernel': np.full((2, D, F), 3 / D, np.float32)},
    'output': {'kernel': np.stack([np.eye(F, D, dtype=np.float32)] * 2)},
  }
  apply = jax.jit(ExpertMLP(config, Experts(2, 2)).apply)
  rngs = {'dropout': jax.random.key(0)}
  y_BTD = apply({'params': params}, n_BTD, rngs=rngs)
  # Of each 0 or 2 * 3, and 5; half of both; 0 or twice as much.
  expected = [0, 10, 16, 22]
  np.testing.assert_allclose(np.unique(np.round(y_BTD, 3)), expected)
  assert (np.abs(y_BTD[0] - y_BTD[1]).max() > 1) == by_row
  np.testing.assert_allclose(apply({'params': params}, n_BTD), 8, rtol=1e-5)


@pytest.mark.parametrize('by_row', [False, True])
def test_attention_drops_probabilities_alike_in_equal_rows_or_not(by_row):
  x_BTD = np.repeat(draw(1, T, D), B, 0)
  inputs = x_BTD, x_BTD, np.ones((B, T), bool)
  config = encoder_config(attention_dropout=0.5, dropout_by_row=by_row)
  attention = ExpertAttention(config, MIX)
  params, dry, _ = run(attention, *inputs)
  y_BTD = jax.jit(attention.apply)(
    {'params': params}, *inputs, rngs={'dropout': jax.random.key(0)}
  )
  assert np.abs(y_BTD - dry).max() > 0.01
  assert_close(dry[0], dry[1])
  assert (np.abs(y_BTD[0] - y_BTD[1]).max() > 0.01) == by_row


def test_layers_of_their_own_have_none():
  make = lambda: EncoderLayer(encoder_config(), experts=MIX)
  with pytest.raises(ValueError, match='options/layer/experts'):
    EncoderLayers(make, 2).init(jax.random.key(0), *example())


def test_hidden_units_have_a_rate_of_their_own():
  config = encoder_config(hidden_dropout=0.5)
  mlp, n_BTD = ExpertMLP(config, MIX), jnp.asarray(draw(B, T, D))
  params, dry, _ = run(mlp, n_BTD)
  rngs = {'dropout': jax.random.key(0)}
  call = lambda mlp: mlp.apply({'params': params}, n_BTD, rngs=rngs)
  assert np.abs(call(mlp) - dry).max() > 0.01
  other = encoder_config(dropout=0.5, hidden_dropout=0.0)
  y_BTD = np.asarray(call(ExpertMLP(other, MIX)))
  dropped = y_BTD == 0
  assert dropped.any()
  np.testing.assert_allclose(
    y_BTD[~dropped], 2 * np.asarray(dry)[~dropped], rtol=1e-4, atol=1e-5
  )


def test_norms_may_follow_attention():
  x_BTD = jnp.asarray(draw(B, T, D))
  attention = ExpertAttention(encoder_config(post_norm=True), MIX)
  _, y_BTD, _ = run(attention, x_BTD, x_BTD, np.ones((B, T), bool))
  np.testing.assert_allclose(y_BTD.mean(-1), 0, atol=1e-5)
  np.testing.assert_allclose(y_BTD.std(-1), 1, atol=1e-3)
