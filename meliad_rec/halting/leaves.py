"""A pytree's floats apart from its other leaves, which have no gradient."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def split(tree: Any) -> tuple[list, list, Callable[[list, list], Any]]:
  """Floats, other leaves, and how the tree is put together again."""
  leaves, structure = jax.tree.flatten(tree)
  is_float = [jnp.issubdtype(a.dtype, jnp.floating) for a in leaves]
  pick = lambda which: [
    a for a, f in zip(leaves, is_float, strict=True) if f == which
  ]

  def join(floats, others):
    floats, others = iter(floats), iter(others)
    return structure.unflatten(next(floats if f else others) for f in is_float)

  return pick(True), pick(False), join
