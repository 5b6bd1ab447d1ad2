"""What is written to memory; feedback_test.py reads it."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.archs import feedback

B, T, D, L = 2, 3, 5, 3
HIDDEN = list(np.random.default_rng(0).normal(size=(L + 1, B, T, D)))


def written(module, *weights):
  names = ['mix'] if len(weights) == 1 else [f'mix_{i + 1}' for i in range(L)]
  params = dict(zip(names, weights, strict=False)) if weights else {}
  found = module().apply({'params': params}, HIDDEN)
  assert len(found) == module().arrays(L)
  return found


def mixed(weight, hidden):
  share = np.exp(weight) / np.exp(weight).sum()
  return sum(s * h for s, h in zip(share, hidden, strict=True))


def close(a, b):
  np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_weighted_sum_is_of_all_layers():
  weight = np.array([0.3, -1.0, 2.0, 0.0])
  (found,) = written(feedback.WeightedSum, jnp.asarray(weight))
  close(found, mixed(weight, HIDDEN))


def test_an_average_counts_the_embedding():
  close(written(feedback.Average)[0], np.mean(HIDDEN, 0))


@pytest.mark.parametrize('layer', [-1, 0, 2])
def test_one_layer(layer):
  one = functools.partial(feedback.OneLayer, layer)
  close(written(one)[0], HIDDEN[layer])


@pytest.mark.parametrize('layer', [-L - 2, L + 1])
def test_a_layer_that_is_not_there(layer):
  with pytest.raises(ValueError, match=f'layer {layer} of {L}; set feedback_'):
    written(functools.partial(feedback.OneLayer, layer))


def test_own_and_below_is_blind_to_what_is_above():
  weights = [np.arange(i + 1.0) for i in range(1, L + 1)]
  found = written(feedback.OwnAndBelow, *(jnp.asarray(w) for w in weights))
  for i, (array, weight) in enumerate(zip(found, weights, strict=True)):
    close(array, mixed(weight, HIDDEN[: i + 2]))
