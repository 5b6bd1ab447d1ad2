"""Heads against NumPy, and what they refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.kernels.reference import NEVER
from meliad_rec.metrics.losses import correct
from meliad_rec.metrics.losses import cross_entropy
from meliad_rec.models import pooling
from meliad_rec.models.heads import Classifier
from meliad_rec.models.heads import Matcher

B, T, D, C = 4, 7, 5, 3
RNG = np.random.default_rng(0)
Y = RNG.normal(size=(B, T, D)).astype(np.float32)
MASK = np.ones((B, T), bool)
MASK[1, 4:] = False
SLOTS = RNG.normal(size=(B, 2, D)).astype(np.float32)


def built(head, draw=True):
  """Returns random parameters, with no bias 0."""
  state = head.initial_state(B, D)
  init = lambda rng: head.init(rng, state, Y, MASK, lambda: SLOTS)
  params = jax.jit(init)(jax.random.key(0))['params']
  rng = np.random.default_rng(1)
  normal = lambda a: rng.normal(size=a.shape).astype(np.float32)
  return jax.tree.map(normal, params) if draw else params


def judged(head, params):
  state = head.initial_state(B, D)
  apply = jax.jit(
    lambda p: head.apply({'params': p}, state, Y, MASK, lambda: SLOTS)
  )
  return apply(params)


def slow(params, features):
  hidden, output = params['hidden'], params['output']
  h = np.maximum(features @ hidden['kernel'] + hidden['bias'], 0)
  return h @ output['kernel'] + output['bias']


def test_of_no_pool_each_token_is_judged():
  head = Classifier(C, None)
  params = built(head)
  state, logits_BTV = judged(head, params)
  assert state == ()
  assert logits_BTV.shape == (B, T, 1 + C)
  assert logits_BTV.dtype == jnp.float32
  close = np.testing.assert_allclose
  close(logits_BTV[..., 1:], slow(params, Y), rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(logits_BTV[..., 0], np.float32(NEVER))


@pytest.mark.parametrize(
  'pool', [pooling.Mean(), pooling.First(), pooling.Last(), pooling.Slots()]
)
def test_a_sequence_is_judged_by_what_is_pooled(pool):
  head = Classifier(C, pool)
  params = built(head)
  state, logits_BTV = judged(head, params)
  expected, pooled = pool(pool.initial_state(B, D), Y, MASK, lambda: SLOTS)
  jax.tree.map(np.testing.assert_array_equal, state, expected)
  found = logits_BTV[..., 1:]
  np.testing.assert_allclose(found, slow(params, pooled), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  'head', [Classifier(C, None), Classifier(2), Matcher(C), Matcher(2)]
)
def test_parameters_are_two_maps(head):
  params = built(head, draw=False)
  features = 4 * D if head.sequences == 2 else D
  outputs = 1 if head.classes == 2 else C
  shapes = {k: v['kernel'].shape for k, v in params.items()}
  assert shapes == {'hidden': (features, D), 'output': (D, outputs)}
  for part in params.values():
    assert part['bias'].shape == part['kernel'].shape[1:]


@pytest.mark.parametrize('target', [1, 2])
def test_of_two_classes_the_loss_is_binary_cross_entropy(target):
  head = Classifier(2, None)
  params = built(head)
  targets_BT = np.full((B, T), target)
  z_BT = slow(params, Y)[..., 0]
  is_2 = float(target == 2)
  p_BT = 1 / (1 + np.exp(-z_BT))
  expected = -(is_2 * np.log(p_BT) + (1 - is_2) * np.log(1 - p_BT))
  _, logits_BTV = judged(head, params)
  nats_BT = cross_entropy(logits_BTV, targets_BT)
  np.testing.assert_allclose(nats_BT, expected, rtol=1e-4, atol=1e-5)
  right_BT = (z_BT > 0) == (target == 2)
  np.testing.assert_array_equal(correct(logits_BTV, targets_BT), right_BT)

  def loss(params):
    _, logits_BTV = judged(head, params)
    return cross_entropy(logits_BTV, targets_BT).sum()

  gradient = jax.grad(loss)(params)['output']['bias']
  np.testing.assert_allclose(gradient, [(p_BT - is_2).sum()], rtol=1e-4)


@pytest.mark.parametrize('classes', [2, 3])
def test_a_class_that_is_none_is_never_likely(classes):
  _, logits_BTV = judged(Classifier(classes), built(Classifier(classes)))
  p_BTV = jax.nn.softmax(logits_BTV)
  np.testing.assert_array_equal(p_BTV[..., 0], 0)
  assert logits_BTV.shape[-1] == 1 + classes


@pytest.mark.parametrize('pool', [pooling.Mean(), pooling.Last()])
def test_a_pair_is_judged_by_both_and_what_they_share(pool):
  head = Matcher(C, pool)
  params = built(head)
  _, logits_BTV = judged(head, params)
  assert logits_BTV.shape == (B // 2, 2 * T, 1 + C)
  _, pooled = pool(pool.initial_state(B, D), Y, MASK, None)
  for pair in range(B // 2):
    u, v = np.asarray(pooled)[2 * pair : 2 * pair + 2, -1]
    features = np.concatenate([u, v, u * v, np.abs(u - v)])
    expected = np.broadcast_to(slow(params, features), (2 * T, C))
    found = logits_BTV[pair, :, 1:]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('classes', [0, 1])
def test_less_than_two_classes_are_refused(classes):
  with pytest.raises(ValueError, match='CLASSES'):
    built(Classifier(classes))


def test_sequences_that_are_not_pooled_cannot_be_compared():
  with pytest.raises(ValueError, match='POOL'):
    built(Matcher(C, None))


POOL_B, POOL_T, POOL_D, S = 3, 11, 5, 4
POOL_Y = RNG.normal(size=(POOL_B, POOL_T, POOL_D)).astype(np.float32)
POOL_SLOTS = RNG.normal(size=(POOL_B, S, POOL_D)).astype(np.float32)
REAL = np.ones((POOL_B, POOL_T), bool)
# Row 0 ends early, row 1 has gaps and begins with one, row 2 is empty.
GAPS = REAL.copy()
GAPS[0, 7:] = False
GAPS[1, [0, 1, 4, 8]] = False
GAPS[2] = False
MASKS = {'real': REAL, 'gaps': GAPS}
POOLS = {
  'mean': (pooling.Mean(), lambda seen: seen.mean(0)),
  'first': (pooling.First(), lambda seen: seen[0]),
  'last': (pooling.Last(), lambda seen: seen[-1]),
}
every = pytest.mark.parametrize('name', POOLS)


def none():
  pytest.fail('the slots were asked for')


def whole(pool, y_BTD, mask_BT):
  return pool(pool.initial_state(POOL_B, POOL_D), y_BTD, mask_BT, none)


@every
@pytest.mark.parametrize('mask', MASKS)
def test_a_pool_is_of_what_was_read_so_far(name, mask):
  pool, of = POOLS[name]
  _, pooled_BTD = jax.jit(lambda y, m: whole(pool, y, m))(POOL_Y, MASKS[mask])
  assert pooled_BTD.shape == POOL_Y.shape
  assert pooled_BTD.dtype == jnp.float32
  for row, place in np.argwhere(MASKS[mask]):
    seen = POOL_Y[row, : place + 1][MASKS[mask][row, : place + 1]]
    close = np.testing.assert_allclose
    close(pooled_BTD[row, place], of(seen), rtol=1e-5, atol=1e-6)


@every
def test_padding_behind_the_end_leaves_the_last_vector(name):
  pool, of = POOLS[name]
  _, pooled_BTD = whole(pool, POOL_Y, GAPS)
  np.testing.assert_allclose(pooled_BTD[0, -1], of(POOL_Y[0, :7]), rtol=1e-5)
  np.testing.assert_array_equal(pooled_BTD[2], 0)


@every
@pytest.mark.parametrize('mask', MASKS)
@pytest.mark.parametrize('at', [1, 4, POOL_T - 1])
def test_it_may_be_split_anywhere(name, mask, at):
  pool, mask_BT = POOLS[name][0], MASKS[mask]
  end, expected = whole(pool, POOL_Y, mask_BT)
  middle, a = whole(pool, POOL_Y[:, :at], mask_BT[:, :at])
  state, b = pool(middle, POOL_Y[:, at:], mask_BT[:, at:], none)
  real_BT = mask_BT.copy()
  real_BT[:, -1] = True  # What is behind the end counts too.
  found, expected = np.concatenate([a, b], 1)[real_BT], expected[real_BT]
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
  close(found, expected)
  jax.tree.map(close, state, end)
  types = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
  assert types(middle) == types(pool.initial_state(POOL_B, POOL_D))


@every
def test_what_is_padding_has_no_influence_and_no_gradient(name):
  pool = POOLS[name][0]

  def loss(y_BTD):
    state, pooled_BTD = whole(pool, y_BTD, GAPS)
    return (pooled_BTD**2).sum() + (jax.tree.leaves(state)[0] ** 2).sum()

  value, gradient = jax.value_and_grad(loss)(POOL_Y)
  junk = np.where(GAPS[..., None], POOL_Y, 1e6).astype(np.float32)
  np.testing.assert_allclose(loss(junk), value, rtol=1e-6)
  np.testing.assert_array_equal(gradient[~GAPS], 0)
  assert np.abs(gradient[0, 0 if name != 'last' else 6]).min() > 0


def test_slots_are_averaged_and_the_same_everywhere():
  pool = pooling.Slots()
  state, pooled_BTD = pool(
    pool.initial_state(POOL_B, POOL_D),
    POOL_Y,
    GAPS,
    lambda: jnp.asarray(POOL_SLOTS, 'bfloat16'),
  )
  assert jax.tree.leaves(state) == []
  assert pooled_BTD.dtype == jnp.float32
  expected = np.broadcast_to(POOL_SLOTS.mean(1)[:, None], POOL_Y.shape)
  np.testing.assert_allclose(pooled_BTD, expected, rtol=0.02, atol=0.02)
