"""What becomes of a state where a new document begins."""

from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.cell import State


class Resettable(struct.PyTreeNode):
  """A part of a state that is too large to pick rows from, and hides them."""

  def reset(self, start_B: jax.Array, fresh: 'Resettable') -> 'Resettable':
    """The part, as good as `fresh` in the rows that begin a new document."""
    raise NotImplementedError


def reset(start_B: jax.Array, fresh: State, state: State) -> State:
  """State in which the rows that begin a new document are fresh."""
  itself = lambda part: isinstance(part, Resettable)

  def pick(f, s):
    if itself(f):
      return s.reset(start_B, f)
    start = start_B.reshape(-1, *[1] * (s.ndim - 1))
    return jnp.where(start, f.astype(s.dtype), s)

  return jax.tree.map(pick, fresh, state, is_leaf=itself)
