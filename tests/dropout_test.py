"""Dropout: rate, scale, tiling, and that it needs an rng."""

import jax
import jax.numpy as jnp
import numpy as np

from meliad_rec.dropout import keep_mask
from meliad_rec.dropout import TiledDropout

B, T, D = 3, 10, 17


def dropped(x, rate=0.3, tile=4, seed=0):
  module = TiledDropout(rate, tile)
  return module.apply({}, x, rngs={'dropout': jax.random.key(seed)})


def test_keep_mask_has_the_rate_and_mean_1():
  keep = np.asarray(keep_mask(jax.random.key(0), 0.3, (100, 200)))
  np.testing.assert_allclose(np.unique(keep), [0, 1 / 0.7], rtol=1e-6)
  np.testing.assert_allclose((keep == 0).mean(), 0.3, atol=0.01)


def test_one_mask_serves_all_rows_and_repeats_along_the_tokens():
  y = np.asarray(dropped(jnp.ones((B, T, D))))
  np.testing.assert_array_equal(y[0], y[1])
  np.testing.assert_array_equal(y[:, :4], y[:, 4:8])
  np.testing.assert_array_equal(y[:, :2], y[:, 8:])
  assert (y[0, 0] != y[0, 1]).any()
  assert set(np.unique(y == 0)) == {False, True}


def test_another_rng_gives_another_mask():
  x = jnp.ones((B, T, D))
  assert (dropped(x, seed=1) != dropped(x, seed=2)).any()


def test_without_rng_or_rate_nothing_is_dropped():
  x = jnp.ones((B, T, D))
  np.testing.assert_array_equal(TiledDropout(0.3).apply({}, x), x)
  np.testing.assert_array_equal(dropped(x, rate=0.0), x)


def test_dtype_stays():
  assert dropped(jnp.ones((B, T, D), jnp.bfloat16)).dtype == jnp.bfloat16
