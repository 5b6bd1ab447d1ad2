"""Parts of arrays along axis 1, that of tokens, and how a scan stacks them."""

import jax
import jax.numpy as jnp


def divisor(T: int, C: int, most: int) -> int:
  """The most tokens, in whole chunks, that divide T; up to `most` if it can."""
  few = range(C, min(most, T) + 1, C)
  return max((K for K in few if T % K == 0), default=C)


def at(a, first, length: int):
  return jax.lax.dynamic_slice_in_dim(a, first, length, 1)


def put(a, part, first):
  return jax.lax.dynamic_update_slice_in_dim(a, part, first, 1)


def pad(a, before: int, behind: int):
  return jnp.pad(a, ((0, 0), (before, behind)) + ((0, 0),) * (a.ndim - 2))


def join(a):
  """[n, B, C, ...] of a scan -> [B, n C, ...]."""
  a = jnp.moveaxis(a, 0, 1)
  return a.reshape(a.shape[0], -1, *a.shape[3:])
