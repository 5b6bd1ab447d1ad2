"""Choosing experts, sorting tokens by them, and how evenly they are used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.layers import experts
from meliad_rec.layers.experts import Experts
from meliad_rec.layers.experts import Grouped
from meliad_rec.layers.experts import Router

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
  with pytest.raises(ValueError, match='7 of 6 experts .* CHOSEN from 1 to'):
    Experts(6, 7)
  with pytest.raises(ValueError, match='balance is -1; .* EXPERT_BALANCE'):
    Experts(6, 2, balance=-1)
