"""Pools, which reduce a sequence to one vector.

A pool yields a vector at each token, from the outputs up to that token. A
sequence may therefore be split anywhere, and labels may be at any token. The
exceptions are `Slots` and `LastSlot`. At padding after the end of a sequence, a
pool yields the vector of the last token.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp

from meliad_rec.models.cell import State


class Pool:
  """Base class of pools.

  Attributes:
    at_end: whether pooled vectors are correct only at the end of a segment.
  """

  at_end = False

  def initial_state(self, batch: int, width: int) -> State:
    """Returns the state at the start of `batch` sequences; D = width."""
    raise NotImplementedError

  def __call__(
    self,
    state: State,
    y_BTD: jax.Array,
    mask_BT: jax.Array,
    slots: Callable[[], jax.Array],
  ) -> tuple[State, jax.Array]:
    """Returns the state after a segment, and the pooled vector at each token.

    Args:
      state: the state before the segment.
      y_BTD: outputs of the cell, float32.
      mask_BT: bool, False at padding.
      slots: function that returns the memory slots [B, S, D] after the segment.

    Returns:
      The state after the segment, and the pooled vectors [B, T, D] float32.
    """
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Mean(Pool):
  """Mean of outputs up to each token. State: their sum [B, D], number [B]."""

  def initial_state(self, batch, width):
    return jnp.zeros((batch, width)), jnp.zeros(batch, jnp.int32)

  def __call__(self, state, y_BTD, mask_BT, slots):
    sum_BD, count_B = state
    real_BTD = jnp.where(mask_BT[..., None], y_BTD, 0)
    sum_BTD = sum_BD[:, None] + jnp.cumsum(real_BTD, 1)
    count_BT = count_B[:, None] + jnp.cumsum(mask_BT, 1, dtype=jnp.int32)
    mean_BTD = sum_BTD / jnp.maximum(count_BT, 1)[..., None]
    return (sum_BTD[:, -1], count_BT[:, -1]), mean_BTD


@dataclasses.dataclass(frozen=True)
class First(Pool):
  """Output of a sequence's first token.

  State: that output [B, D], and bool [B], False before the first token.
  """

  def initial_state(self, batch, width):
    return jnp.zeros((batch, width)), jnp.zeros(batch, bool)

  def __call__(self, state, y_BTD, mask_BT, slots):
    first_BD, known_B = state
    here_BD = at(y_BTD, jnp.argmax(mask_BT, 1)[:, None])[:, 0]
    known_BT = known_B[:, None] | (jnp.cumsum(mask_BT, 1) > 0)
    new_B = known_BT[:, -1] & ~known_B
    first_BD = jnp.where(new_B[:, None], here_BD, first_BD)
    pooled_BTD = jnp.where(known_BT[..., None], first_BD[:, None], 0)
    return (first_BD, known_BT[:, -1]), pooled_BTD


@dataclasses.dataclass(frozen=True)
class Last(Pool):
  """Output of each token; at padding, the output of the last token.

  State: the output of the last token so far [B, D].
  """

  def initial_state(self, batch, width):
    return jnp.zeros((batch, width))

  def __call__(self, state, y_BTD, mask_BT, slots):
    place_BT = jnp.where(mask_BT, jnp.arange(mask_BT.shape[1]), -1)
    place_B1 = place_BT.max(1, keepdims=True)
    here_BD = at(y_BTD, jnp.maximum(place_B1, 0))[:, 0]
    last_BD = jnp.where(place_B1 < 0, state, here_BD)
    # Padding comes after all tokens.
    return last_BD, jnp.where(mask_BT[..., None], y_BTD, last_BD[:, None])


@dataclasses.dataclass(frozen=True)
class Slots(Pool):
  """Mean of the memory slots after the segment, the same at every token.

  A document may therefore have a label only at its last token. State: none.
  """

  at_end = True

  def initial_state(self, batch, width):
    return ()

  def __call__(self, state, y_BTD, mask_BT, slots):
    pooled_BD = self._pooled(slots().astype(jnp.float32))
    return state, jnp.broadcast_to(pooled_BD[:, None], y_BTD.shape)

  def _pooled(self, slots_BSD: jax.Array) -> jax.Array:
    return slots_BSD.mean(1)


@dataclasses.dataclass(frozen=True)
class LastSlot(Slots):
  """The last memory slot after the segment, the same at every token.

  A document may therefore have a label only at its last token. State: none.
  """

  def _pooled(self, slots_BSD):
    return slots_BSD[:, -1]


def at(y_BTD: jax.Array, place_BS: jax.Array) -> jax.Array:
  """Returns [B, S, D]: the vectors at S indices into the tokens of each row."""
  return jnp.take_along_axis(y_BTD, place_BS[..., None], 1)
