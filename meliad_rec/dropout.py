"""Dropout with small masks, as the authors' code draws them."""

from flax import linen as nn
import jax
import jax.numpy as jnp


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


def keep_mask(rng, rate: float, shape: tuple[int, ...]):
  """0 with probability `rate`, else 1 / (1 - rate), float32."""
  return jax.random.bernoulli(rng, 1 - rate, shape) / (1 - rate)
