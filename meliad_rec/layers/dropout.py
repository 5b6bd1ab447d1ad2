"""Dropout of activations, of attention probabilities, and of whole layers.

Dropout is active only in calls that are given an rng named 'dropout'.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from meliad_rec.distributed.partition import BATCH_AXES
from meliad_rec.kernels.blocks import keep_by_position
from meliad_rec.kernels.blocks import keep_mask


class TiledDropout(nn.Module):
  """Dropout whose mask [min(T, tile), D] serves all rows and repeats along T.

  The dropout of google-research/meliad is the same. On some machines, drawing
  random bits for every element costs more than the arithmetic of the layer.

  Attributes:
    rate: probability of dropping an element.
    tile: number of tokens after which the mask repeats.
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

  The mask is the same whether a cell reads tokens one by one in a scan or all
  at once. Gal and Ghahramani 2016, section 4.
  """

  rate: float

  @nn.compact
  def __call__(self, x_BTD):
    if not self.rate or not self.has_rng('dropout'):
      return x_BTD
    B, _, D = x_BTD.shape
    keep_B1D = keep_mask(self.make_rng('dropout'), self.rate, (B, 1, D))
    return x_BTD * keep_B1D.astype(x_BTD.dtype)


class PositionDropout(nn.Module):
  """Dropout whose mask [T, D] serves all rows and depends on positions.

  The mask of a token is the same whether a cell reads tokens one by one in a
  scan or all at once.
  """

  rate: float

  @nn.compact
  def __call__(self, x_BTD, first):
    """Returns x_BTD with dropout.

    Args:
      x_BTD: vectors of T tokens, one after another.
      first: int, position of the first of these tokens.
    """
    if not self.rate or not self.has_rng('dropout'):
      return x_BTD
    T, D = x_BTD.shape[1:]
    rng = self.make_rng('dropout')
    keep_TD = keep_by_position(rng, self.rate, first, T, (D,))
    return x_BTD * keep_TD.astype(x_BTD.dtype)


class RowDropout(nn.Module):
  """Ordinary dropout: its mask [B, T, D] is drawn for every element.

  The mask of a row depends on the random key and on the index of the row in the
  batch, but not on the number of rows.
  """

  rate: float

  @nn.compact
  def __call__(self, x_BTD):
    if not self.rate or not self.has_rng('dropout'):
      return x_BTD
    kept_BTD = keep_by_row(self.make_rng('dropout'), self.rate, x_BTD.shape)
    keep_BTD = kept_BTD / (1 - self.rate)
    return x_BTD * keep_BTD.astype(x_BTD.dtype)


def attention_keep(
  module: nn.Module, rate: float, shape: tuple[int, ...], by_row: bool
):
  """Draws which attention probabilities dropout keeps.

  Args:
    module: module whose rng is used.
    rate: fraction of the probabilities that is dropped.
    shape: B, H, T and S.
    by_row: whether each row has its own mask.

  Returns:
    bool [H, T, S], or [B, H, T, S] if by_row. None if the rate is 0 or the call
    has no rng named 'dropout'.
  """
  if not rate or not module.has_rng('dropout'):
    return None
  rng = module.make_rng('dropout')
  if by_row:
    return keep_by_row(rng, rate, shape)
  return jax.random.bernoulli(rng, 1 - rate, shape[1:])


def keep_by_row(rng, rate: float, shape: tuple[int, ...]):
  """Draws booleans of a shape; each is False with probability `rate`.

  Rows are the first axis of `shape`. Each row has its own random key, so its
  booleans do not depend on how shard_map distributes the rows over devices.
  """
  mesh, rows = jax.sharding.get_abstract_mesh(), shape[0]
  manual = [
    name
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    if kind == AxisType.Manual
  ]
  row_axes = tuple(axis for axis in BATCH_AXES if axis in manual)
  first = jax.lax.axis_index(row_axes) * rows if row_axes else 0
  key_B = jax.vmap(jax.random.fold_in, (None, 0))(rng, first + jnp.arange(rows))
  draw = lambda key: jax.random.bernoulli(key, 1 - rate, shape[1:])
  return jax.vmap(draw)(key_B)


def drop_layer(layer: nn.Module, rate: float, x_BTD, y_BTD):
  """Applies LayerDrop: in training, a layer is skipped with some probability.

  One draw decides for the whole batch. Fan et al. 2019, section 3. The result
  is x_BTD if the layer is skipped, else y_BTD.

  Args:
    layer: module whose rng is used.
    rate: probability that the layer is skipped.
    x_BTD: the layer's input.
    y_BTD: the layer's output, including the residual connection.

  Raises:
    ValueError: rate is outside [0, 1).
  """
  check_layer_drop(rate)
  if not rate or not layer.has_rng('dropout'):
    return y_BTD
  return drop_by(layer.make_rng('dropout'), rate, x_BTD, y_BTD)


def drop_by(rng, rate: float, x_BTD, y_BTD):
  """Applies LayerDrop with a given random key; see `drop_layer`."""
  keep = jax.random.bernoulli(rng, 1 - rate)
  return jnp.where(keep, y_BTD, x_BTD)


def check_layer_drop(rate: float) -> None:
  """Raises ValueError if the rate is outside [0, 1)."""
  check_rate('layer_drop', rate, 'LAYER_DROP')


def check_rate(name: str, rate: float, setting: str) -> None:
  """Raises ValueError if a rate is outside [0, 1).

  Args:
    name: name of the rate, in the message.
    rate: the rate.
    setting: setting to change.
  """
  if not 0 <= rate < 1:
    raise ValueError(
      f'{name} must be at least 0 and less than 1, got {rate}. Set {setting}.'
    )
