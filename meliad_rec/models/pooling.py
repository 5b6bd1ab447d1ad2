"""How the outputs of a sequence become one vector: of what was read so far.

There is a vector at each token, so that a sequence may be split anywhere, and
labels may lie anywhere. Padding adds nothing; behind the end of a sequence the
vector is that of its end.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp

from meliad_rec.models.cell import State


class Pool:
  """Base class.

  Attributes:
    at_end: whether it is right behind a segment alone, and not at each token.
  """

  at_end = False

  def initial_state(self, batch: int, width: int) -> State:
    """State at the start of a sequence, where D = width."""
    raise NotImplementedError

  def __call__(
    self,
    state: State,
    y_BTD: jax.Array,
    mask_BT: jax.Array,
    slots: Callable[[], jax.Array],
  ) -> tuple[State, jax.Array]:
    """The state behind a segment, and what is pooled up to each token.

    Args:
      state: where the segment before left it.
      y_BTD: outputs, float32.
      mask_BT: bool, False at padding.
      slots: gives the memory slots [B, S, D] behind the segment.

    Returns:
      State, and [B, T, D] float32.
    """
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Mean(Pool):
  """The mean. State: the sum [B, D], and how many there were [B]."""

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
  """That of the first token. State: it [B, D], and whether it was there [B]."""

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
  """That of the last token, no padding. State: it, [B, D]."""

  def initial_state(self, batch, width):
    return jnp.zeros((batch, width))

  def __call__(self, state, y_BTD, mask_BT, slots):
    place_BT = jnp.where(mask_BT, jnp.arange(mask_BT.shape[1]), -1)
    place_B1 = place_BT.max(1, keepdims=True)
    here_BD = at(y_BTD, jnp.maximum(place_B1, 0))[:, 0]
    last_BD = jnp.where(place_B1 < 0, state, here_BD)
    # Padding is behind all tokens.
    return last_BD, jnp.where(mask_BT[..., None], y_BTD, last_BD[:, None])


@dataclasses.dataclass(frozen=True)
class Slots(Pool):
  """The mean of the memory slots, at every place those behind the segment.

  So no label may lie before the last token of a document. State: none.
  """

  at_end = True

  def initial_state(self, batch, width):
    return ()

  def __call__(self, state, y_BTD, mask_BT, slots):
    mean_BD = slots().astype(jnp.float32).mean(1)
    return state, jnp.broadcast_to(mean_BD[:, None], y_BTD.shape)


def at(y_BTD: jax.Array, place_BS: jax.Array) -> jax.Array:
  """[B, S, D]: the vectors at S places of each row."""
  return jnp.take_along_axis(y_BTD, place_BS[..., None], 1)
