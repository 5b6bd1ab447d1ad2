"""Heads against NumPy, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.kernels.reference import NEVER
from meliad_rec.metrics.losses import correct
from meliad_rec.metrics.losses import cross_entropy
from meliad_rec.models import pooling
from meliad_rec.models.heads import Classifier
from meliad_rec.models.heads import Head
from meliad_rec.models.heads import Matcher

B, T, D, C = 4, 7, 5, 3
RNG = np.random.default_rng(0)
Y = RNG.normal(size=(B, T, D)).astype(np.float32)
MASK = np.ones((B, T), bool)
MASK[1, 4:] = False
SLOTS = RNG.normal(size=(B, 2, D)).astype(np.float32)


def built(head, draw=True):
  """Parameters, all drawn so that no bias is 0."""
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
  with pytest.raises(ValueError, match=f'has {classes} classes; it needs 2 or'):
    built(Classifier(classes))


def test_sequences_that_are_not_pooled_cannot_be_compared():
  with pytest.raises(ValueError, match='two sequences, and its pool is None'):
    built(Matcher(C, None))


def test_how_many_sequences_a_row_holds():
  assert (Head.sequences, Classifier.sequences, Matcher.sequences) == (1, 1, 2)
