"""Heads and pools against NumPy, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.kernels.reference import MASKED
from meliad_rec.metrics.losses import correct
from meliad_rec.metrics.losses import cross_entropy
from meliad_rec.models import pooling
from meliad_rec.models.heads import Classifier
from meliad_rec.models.heads import Matcher
from tests.cells import draw

B, T, D, S, C = 4, 11, 5, 2, 3
Y, SLOTS = draw(B, T, D), draw(B, S, D, seed=1)
# Row 0 ends early, row 1 has gaps and begins with one, row 2 is empty.
MASK = np.ones((B, T), bool)
MASK[0, 7:] = False
MASK[1, [0, 1, 4, 8]] = False
MASK[2] = False


def judged(head):
  """Returns random parameters, with no bias 0, and a function of them."""
  state = head.initial_state(B, D)
  given = state, Y, MASK, lambda: SLOTS
  init = jax.jit(lambda rng: head.init(rng, *given))
  params = init(jax.random.key(0))['params']
  rng = np.random.default_rng(1)
  normal = lambda a: rng.normal(size=a.shape).astype(np.float32)
  params = jax.tree.map(normal, params)
  return params, jax.jit(lambda p: head.apply({'params': p}, *given))


def slow(params, features):
  hidden, output = params['hidden'], params['output']
  h = np.maximum(features @ hidden['kernel'] + hidden['bias'], 0)
  return h @ output['kernel'] + output['bias']


@pytest.mark.parametrize('pool', [None, pooling.Mean(), pooling.Slots()])
def test_tokens_are_judged_or_what_is_pooled(pool):
  head = Classifier(C, pool)
  params, judge = judged(head)
  state, logits_BTV = judge(params)
  expected, pooled = (), Y
  if pool is not None:
    given = pool.initial_state(B, D), Y, MASK, lambda: SLOTS
    expected, pooled = pool(*given)
  jax.tree.map(np.testing.assert_array_equal, state, expected)
  assert logits_BTV.shape == (B, T, 1 + C)
  assert logits_BTV.dtype == jnp.float32
  found = logits_BTV[..., 1:]
  np.testing.assert_allclose(found, slow(params, pooled), rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(logits_BTV[..., 0], np.float32(MASKED))


def test_of_two_classes_the_loss_is_binary_cross_entropy():
  params, judge = judged(Classifier(2, None))
  is_2_BT = np.arange(B * T).reshape(B, T) % 3 == 0
  targets_BT = 1 + is_2_BT
  z_BT = slow(params, Y)[..., 0]
  p_BT = 1 / (1 + np.exp(-z_BT))
  expected_BT = -np.log(np.where(is_2_BT, p_BT, 1 - p_BT))

  def loss(params):
    _, logits_BTV = judge(params)
    nats_BT = cross_entropy(logits_BTV, targets_BT)
    return nats_BT.sum(), (logits_BTV, nats_BT)

  grad = jax.jit(jax.grad(loss, has_aux=True))
  gradients, (logits_BTV, nats_BT) = grad(params)
  np.testing.assert_allclose(nats_BT, expected_BT, rtol=1e-4, atol=1e-5)
  right_BT = (z_BT > 0) == is_2_BT
  np.testing.assert_array_equal(correct(logits_BTV, targets_BT), right_BT)
  gradient = gradients['output']['bias']
  np.testing.assert_allclose(gradient, [(p_BT - is_2_BT).sum()], rtol=1e-4)


def test_a_pair_is_judged_by_both_and_what_they_share():
  pool = pooling.Mean()
  params, judge = judged(Matcher(C, pool))
  _, logits_BTV = judge(params)
  assert logits_BTV.shape == (B // 2, 2 * T, 1 + C)
  _, pooled = pool(pool.initial_state(B, D), Y, MASK, None)
  u, v = np.asarray(pooled)[::2, -1], np.asarray(pooled)[1::2, -1]
  features = np.concatenate([u, v, u * v, np.abs(u - v)], -1)
  expected = np.repeat(slow(params, features)[:, None], 2 * T, 1)
  found = logits_BTV[..., 1:]
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ('head', 'setting'), [(Classifier(1), 'CLASSES'), (Matcher(C, None), 'POOL')]
)
def test_impossible_settings(head, setting):
  with pytest.raises(ValueError, match=setting):
    judged(head)


@pytest.mark.parametrize(
  ('pool', 'of'),
  [
    (pooling.Mean(), lambda seen: seen.mean(0)),
    (pooling.First(), lambda seen: seen[0]),
    (pooling.Last(), lambda seen: seen[-1]),
  ],
)
def test_a_pool_is_of_what_was_read_so_far(pool, of):
  """Padding leaves it as it is, and has no gradient."""

  def loss(y_BTD):
    slots = lambda: pytest.fail('the slots were asked for')
    state, pooled_BTD = pool(pool.initial_state(B, D), y_BTD, MASK, slots)
    total = (pooled_BTD**2).sum() + (jax.tree.leaves(state)[0] ** 2).sum()
    return total, pooled_BTD

  grad = jax.jit(jax.grad(loss, has_aux=True))
  gradient, pooled_BTD = grad(Y)
  assert pooled_BTD.dtype == jnp.float32
  for row, place in np.argwhere(MASK):
    seen = Y[row, : place + 1][MASK[row, : place + 1]]
    expected = of(seen)
    found = pooled_BTD[row, place]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  at_end = pooled_BTD[0, -1]
  np.testing.assert_allclose(at_end, of(Y[0, :7]), rtol=1e-5)
  np.testing.assert_array_equal(pooled_BTD[2], 0)
  np.testing.assert_array_equal(gradient[~MASK], 0)
  assert np.abs(gradient[0, 6 if pool == pooling.Last() else 0]).min() > 0
  junk = np.where(MASK[..., None], Y, 1e6).astype(np.float32)
  np.testing.assert_allclose(grad(junk)[1][MASK], pooled_BTD[MASK], rtol=1e-6)


@pytest.mark.parametrize(
  ('pool', 'expected_BD'),
  [(pooling.Slots(), SLOTS.mean(1)), (pooling.LastSlot(), SLOTS[:, -1])],
)
def test_what_is_pooled_of_slots_is_the_same_everywhere(pool, expected_BD):
  slots = lambda: jnp.asarray(SLOTS, 'bfloat16')
  state, pooled_BTD = pool(pool.initial_state(B, D), Y, MASK, slots)
  assert jax.tree.leaves(state) == []
  assert pooled_BTD.dtype == jnp.float32
  expected = np.repeat(expected_BD[:, None], T, 1)
  np.testing.assert_allclose(pooled_BTD, expected, rtol=0.02, atol=0.02)
