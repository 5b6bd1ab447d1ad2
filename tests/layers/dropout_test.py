"""Dropout: rate, scale, tiling, rng; LayerDrop."""

import math

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from meliad_rec.distributed import partition
from meliad_rec.kernels.blocks import keep_mask
from meliad_rec.layers.dropout import drop_layer
from meliad_rec.layers.dropout import keep_by_row
from meliad_rec.layers.dropout import LockedDropout
from meliad_rec.layers.dropout import RowDropout
from meliad_rec.layers.dropout import TiledDropout

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


def locked(x, rate=0.3, seed=0):
  rngs = {'dropout': jax.random.key(seed)}
  return np.asarray(LockedDropout(rate).apply({}, x, rngs=rngs))


def test_a_locked_mask_is_of_the_row_and_not_of_the_tokens():
  one, many = locked(jnp.ones((B, 1, D))), locked(jnp.ones((B, 64, D)))
  np.testing.assert_array_equal(many, np.repeat(one, 64, 1))
  assert (one[0] != one[1]).any()
  assert (one != locked(jnp.ones((B, 1, D)), seed=1)).any()
  wide = locked(jnp.ones((100, 1, 200)))
  np.testing.assert_allclose(np.unique(wide), [0, 1 / 0.7], rtol=1e-6)
  np.testing.assert_allclose((wide == 0).mean(), 0.3, atol=0.01)


def by_row(x, rate=0.3, seed=0):
  rngs = {'dropout': jax.random.key(seed)}
  return np.asarray(RowDropout(rate).apply({}, x, rngs=rngs))


def test_each_row_drops_numbers_of_its_own():
  y = by_row(jnp.ones((B, 200, D)))
  np.testing.assert_allclose(np.unique(y), [0, 1 / 0.7], rtol=1e-6)
  np.testing.assert_allclose((y == 0).mean(), 0.3, atol=0.02)
  for a, b in ((y[0], y[1]), (y[1], y[2]), (y[:, :72], y[:, 128:])):
    # As often alike as two that have nothing to do with each other.
    np.testing.assert_allclose((a == b).mean(), 0.58, atol=0.03)
  np.testing.assert_array_equal(by_row(jnp.ones((2, 200, D))), y[:2])
  assert (by_row(jnp.ones((B, 200, D)), seed=1) != y).any()


@pytest.mark.parametrize('axes', [(8, 1, 1), (2, 2, 2), (1, 4, 2)])
def test_a_row_keeps_the_same_on_any_device(axes):
  """Devices that draw for their own rows draw differently."""
  draw = lambda rng, rows: keep_by_row(rng, 0.3, (rows, T, D))
  expected = draw(jax.random.key(0), 8)
  mesh = partition.make_mesh(*axes)
  cut = tuple(a for a in partition.BATCH_AXES if mesh.shape[a] > 1)
  places = math.prod(mesh.shape[axis] for axis in cut)
  apart = jax.shard_map(
    lambda rng: draw(rng, 8 // places),
    in_specs=PartitionSpec(),
    out_specs=PartitionSpec(cut),
    axis_names=set(cut),
    check_vma=False,
  )
  with jax.set_mesh(mesh):
    for run in jax.jit(apart), jax.jit(lambda rng: draw(rng, 8)):
      np.testing.assert_array_equal(run(jax.random.key(0)), expected)


class Twice(nn.Module):
  """Layer that doubles its input, with LayerDrop."""

  rate: float

  @nn.compact
  def __call__(self, x_BTD):
    return drop_layer(self, self.rate, x_BTD, 2 * x_BTD)


def test_a_layer_is_left_out_as_often_as_it_should_for_the_whole_batch():
  x = jnp.ones((B, T, D))
  apply = lambda key: Twice(0.3).apply({}, x, rngs={'dropout': key})
  y = jax.vmap(apply)(jax.random.split(jax.random.key(0), 2000))
  flat = np.asarray(y).reshape(2000, -1)
  assert np.ptp(flat, 1).max() == 0
  assert set(flat[:, 0]) == {1, 2}
  np.testing.assert_allclose((flat[:, 0] == 1).mean(), 0.3, atol=0.03)


def test_a_layer_is_left_out_in_training_alone():
  x = jnp.ones((B, T, D))
  np.testing.assert_array_equal(Twice(0.999).apply({}, x), 2 * x)
  rngs = {'dropout': jax.random.key(0)}
  np.testing.assert_array_equal(Twice(0.999).apply({}, x, rngs=rngs), x)
  np.testing.assert_array_equal(Twice(0.0).apply({}, x, rngs=rngs), 2 * x)


@pytest.mark.parametrize('rate', [1.0, -0.1])
def test_a_share_of_layers_that_cannot_be(rate):
  with pytest.raises(ValueError, match='LAYER_DROP'):
    Twice(rate).apply({}, jnp.ones((B, T, D)))


@pytest.mark.parametrize('kind', [TiledDropout, LockedDropout, RowDropout])
def test_dropout_needs_rate_and_rng_and_keeps_the_dtype(kind):
  x = jnp.ones((3, 5, 7), jnp.bfloat16)
  rngs = {'dropout': jax.random.key(0)}
  np.testing.assert_array_equal(kind(0.5).apply({}, x), x)
  np.testing.assert_array_equal(kind(0.0).apply({}, x, rngs=rngs), x)
  dropped = kind(0.5).apply({}, x, rngs=rngs)
  assert dropped.dtype == x.dtype and (dropped != x).any()
