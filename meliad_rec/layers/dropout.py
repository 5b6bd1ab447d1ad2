"""Dropout of numbers, alike in all rows as in meliad or not; and of layers."""

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from meliad_rec.distributed.partition import BATCH_AXES
from meliad_rec.kernels.blocks import keep_mask


class TiledDropout(nn.Module):
  """Dropout whose mask [min(T, 128), D] serves all rows and repeats along T.

  Drawing random bits for every element costs more than the layer's own
  arithmetic on some machines. On only where an rng named 'dropout' is given.
  """

  rate: float
  tile: int = 128

  @nn.compact
  def __call__(self, x_BTD):
    if not self.rate or not self.has_rng('dropout'):
      return x_BTD
    T, D = x_BTD.shape[1:]
    keep_TD = keep_mask(
      self.make_rng('dropout'), self.rate, (min(T, self.tile), D)
    )
    keep_TD = jnp.tile(keep_TD, (-(-T // self.tile), 1))[:T]
    return x_BTD * keep_TD.astype(x_BTD.dtype)


class LockedDropout(nn.Module):
  """Dropout whose mask [B, 1, D] is the same at all tokens of a row.

  So cells that read token by token, in one scan, drop what they would drop if
  they read all tokens at once. Gal and Ghahramani 2016, section 4.
  """

  rate: float

  @nn.compact
  def __call__(self, x_BTD):
    if not self.rate or not self.has_rng('dropout'):
      return x_BTD
    B, _, D = x_BTD.shape
    keep_B1D = keep_mask(self.make_rng('dropout'), self.rate, (B, 1, D))
    return x_BTD * keep_B1D.astype(x_BTD.dtype)


class RowDropout(nn.Module):
  """Dropout whose mask [B, T, D] is drawn anew for each number of each row.

  The usual one. What a row drops depends on its place in the batch, and not on
  the other rows.
  """

  rate: float

  @nn.compact
  def __call__(self, x_BTD):
    if not self.rate or not self.has_rng('dropout'):
      return x_BTD
    kept_BTD = kept_by_row(self.make_rng('dropout'), self.rate, x_BTD.shape)
    keep_BTD = kept_BTD / (1 - self.rate)
    return x_BTD * keep_BTD.astype(x_BTD.dtype)


def kept_by_row(rng, rate: float, shape: tuple[int, ...]):
  """False with probability `rate`; each row, of the first axis, has its key.

  So a row keeps the same on a device that has all rows, and on one that, under
  shard_map, has some of them.
  """
  mesh, rows = jax.sharding.get_abstract_mesh(), shape[0]
  manual = [
    name
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    if kind == AxisType.Manual
  ]
  cut = tuple(axis for axis in BATCH_AXES if axis in manual)
  first = jax.lax.axis_index(cut) * rows if cut else 0
  key_B = jax.vmap(jax.random.fold_in, (None, 0))(rng, first + jnp.arange(rows))
  draw = lambda key: jax.random.bernoulli(key, 1 - rate, shape[1:])
  return jax.vmap(draw)(key_B)


def drop_layer(layer: nn.Module, rate: float, x_BTD, y_BTD):
  """What follows a layer that made y_BTD of x_BTD: LayerDrop.

  In training, where an rng named 'dropout' is given, x_BTD with probability
  `rate`, for the whole batch; else y_BTD. Fan et al. 2019, section 3.

  Args:
    layer: draws from its rng.
    rate: share of the steps in which the layer is left out.
    x_BTD: its input.
    y_BTD: its output, with the residual.

  Raises:
    ValueError: rate is outside [0, 1).
  """
  check_layer_drop(rate)
  if not rate or not layer.has_rng('dropout'):
    return y_BTD
  return drop_by(layer.make_rng('dropout'), rate, x_BTD, y_BTD)


def drop_by(rng, rate: float, x_BTD, y_BTD):
  """As drop_layer in training, given its key."""
  keep = jax.random.bernoulli(rng, 1 - rate)
  return jnp.where(keep, y_BTD, x_BTD)


def check_layer_drop(rate: float) -> None:
  """Raises ValueError if rate is outside [0, 1)."""
  if not 0 <= rate < 1:
    raise ValueError(
      f'layer_drop is {rate}; it needs 0 or more and less than 1. Set '
      'LAYER_DROP.'
    )
