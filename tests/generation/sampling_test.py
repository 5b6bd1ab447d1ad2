"""Filters keep exactly the tokens they name; samples follow probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.generation.sampling import Sampler

# Token 0 is the likeliest, and is never drawn.
P = jnp.array([0.9, 0.04, 0.03, 0.02, 0.01])
LOGITS_BV = jnp.log(jnp.stack([P, P[jnp.array([0, 4, 3, 2, 1])]]))


def drawn(sampler, count=400):
  rngs = jax.random.split(jax.random.key(5), (count, len(LOGITS_BV)))
  ids = jax.jit(jax.vmap(lambda rng: sampler(rng, LOGITS_BV)))(rngs)
  return [set(row.tolist()) for row in ids.T], ids


def test_greedy_takes_the_likeliest_except_padding():
  sets, _ = drawn(Sampler(temperature=0.0), 3)
  assert sets == [{1}, {4}]


@pytest.mark.parametrize(
  ('settings', 'kept'),
  [
    ({'top_k': 2}, {1, 2}),
    *(({'top_p': 0.3}, {1}), ({'top_p': 0.71}, {1, 2, 3})),
    ({'top_k': 3, 'top_p': 0.5}, {1, 2}),
  ],
)
def test_filters(settings, kept):
  """Without token 0 the probabilities are 0.4, 0.3, 0.2 and 0.1."""
  sets, _ = drawn(Sampler(**settings))
  assert sets == [kept, {5 - token for token in kept}]


def test_temperature_sharpens():
  for temperature in (1.0, 0.5):
    _, ids = drawn(Sampler(temperature=temperature), 20_000)
    share = np.bincount(ids[:, 0], minlength=5) / len(ids)
    p = np.array([0, 0.4, 0.3, 0.2, 0.1]) ** (1 / temperature)
    np.testing.assert_allclose(share, p / p.sum(), atol=0.02)


@pytest.mark.parametrize('settings', [{'temperature': 1e300}, {'top_p': 1e-50}])
def test_padding_is_not_drawn_where_settings_round_to_0_or_infinity(settings):
  sets, _ = drawn(Sampler(**settings))
  assert not {0} & (sets[0] | sets[1])
  assert ('temperature' in settings) == (len(sets[0]) == 4)


@pytest.mark.parametrize(
  'wrong',
  [
    {'temperature': -1.0},
    {'temperature': float('nan')},
    {'top_k': 0},
    {'top_p': 0.0},
  ],
)
def test_wrong_settings(wrong):
  with pytest.raises(ValueError, match=next(iter(wrong))):
    Sampler(**wrong)
