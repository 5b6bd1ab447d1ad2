"""Dropout: rate, scale, tiling, rng; LayerDrop."""

import math

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from meliad_rec.distributed import partition
from meliad_rec.layers.dropout import attention_keep
from meliad_rec.layers.dropout import drop_layer
from meliad_rec.layers.dropout import keep_by_row
from meliad_rec.layers.dropout import LockedDropout
from meliad_rec.layers.dropout import RowDropout
from meliad_rec.layers.dropout import TiledDropout

B, T, D = 3, 200, 1000


def dropped(kind, rate=0.3, seed=0, tokens=T, dtype='float32', **options):
  """Ones [B, tokens, D], after dropout."""
  x_BTD, rngs = jnp.ones((B, tokens, D), dtype), {}
  if seed is not None:
    rngs['dropout'] = jax.random.key(seed)
  return np.asarray(kind(rate, **options).apply({}, x_BTD, rngs=rngs))


@pytest.mark.parametrize('kind', [TiledDropout, LockedDropout, RowDropout])
def test_rate_scale_rng_and_dtype(kind):
  y = dropped(kind)
  np.testing.assert_allclose(np.unique(y), [0, 1 / 0.7], rtol=1e-6)
  np.testing.assert_allclose((y == 0).mean(), 0.3, atol=0.01)
  assert (dropped(kind, seed=1) != y).any()
  for nothing in {'rate': 0.0}, {'seed': None}:
    np.testing.assert_array_equal(dropped(kind, **nothing), 1)
  assert dropped(kind, dtype='bfloat16').dtype == jnp.bfloat16


def test_one_mask_serves_all_rows_and_repeats_along_the_tokens():
  y = dropped(TiledDropout, tokens=10, tile=4)
  np.testing.assert_array_equal(y[0], y[1])
  np.testing.assert_array_equal(y[:, :4], y[:, 4:8])
  np.testing.assert_array_equal(y[:, :2], y[:, 8:])
  assert (y[0, 0] != y[0, 1]).any()


def test_a_locked_mask_is_of_the_row_and_not_of_the_tokens():
  one, many = dropped(LockedDropout, tokens=1), dropped(LockedDropout)
  np.testing.assert_array_equal(many, np.repeat(one, T, 1))
  assert (one[0] != one[1]).any()


def test_each_row_drops_numbers_of_its_own():
  y = dropped(RowDropout)
  for a, b in ((y[0], y[1]), (y[1], y[2]), (y[:, :72], y[:, 128:])):
    # As often alike as two that have nothing to do with each other.
    np.testing.assert_allclose((a == b).mean(), 0.58, atol=0.03)


@pytest.mark.parametrize('by_row', [False, True])
def test_dropout_of_probabilities(by_row):
  """Heads and queries have their own masks; rows have or share them."""

  class Reader(nn.Module):
    def __call__(self):
      return attention_keep(self, 0.3, (B, 2, 40, 50), by_row)

  found = np.asarray(Reader().apply({}, rngs={'dropout': jax.random.key(0)}))
  assert found.shape == ((B,) if by_row else ()) + (2, 40, 50)
  assert abs(found.mean() - 0.7) < 0.02
  for axis in range(found.ndim):
    a, b = np.moveaxis(found, axis, 0)[:2]
    assert abs((a == b).mean() - 0.58) < 0.15
  assert Reader().apply({}) is None


@pytest.mark.parametrize('axes', [(8, 1, 1), (2, 2, 2)])
def test_a_row_keeps_the_same_on_any_device(axes):
  """Devices that draw for their own rows draw differently."""
  draw = lambda rng, rows: keep_by_row(rng, 0.3, (rows, 10, 17))
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


def test_a_layer_is_left_out_for_the_whole_batch_in_training_alone():
  x = jnp.ones((B, 10, 17))
  apply = lambda key: Twice(0.3).apply({}, x, rngs={'dropout': key})
  y = jax.jit(jax.vmap(apply))(jax.random.split(jax.random.key(0), 2000))
  flat = np.asarray(y).reshape(2000, -1)
  assert np.ptp(flat, 1).max() == 0
  assert set(flat[:, 0]) == {1, 2}
  np.testing.assert_allclose((flat[:, 0] == 1).mean(), 0.3, atol=0.03)
  np.testing.assert_array_equal(Twice(0.999).apply({}, x), 2 * x)
  rngs = {'dropout': jax.random.key(0)}
  np.testing.assert_array_equal(Twice(0.0).apply({}, x, rngs=rngs), 2 * x)


@pytest.mark.parametrize('rate', [1.0, -0.1])
def test_a_share_of_layers_that_cannot_be(rate):
  with pytest.raises(ValueError, match='LAYER_DROP'):
    Twice(rate).apply({}, jnp.ones((B, 10, 17)))
