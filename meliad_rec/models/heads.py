"""What stands in the place of next-token logits: labels of tokens or sequences.

Ray Chowdhury and Caragea 2024, as their code: a linear map, ReLU, a linear map;
of two classes one logit. Logits are of the label ids 0 to `classes`, of which 0
is no label. Gradients stop at the start of a segment, those of a pool too: what
earlier segments left is read as it is.
"""

from collections.abc import Callable

from flax import linen as nn
import jax
import jax.numpy as jnp

from meliad_rec.kernels.reference import NEVER
from meliad_rec.models.cell import State
from meliad_rec.models.embedding import Embedding
from meliad_rec.models.pooling import Mean
from meliad_rec.models.pooling import Pool


class Head(nn.Module):
  """Base class. State: that of the pool.

  Attributes:
    classes: of labels, which are the ids from 1 on.
    pool: what is judged, of pooling.py; None: each token.
    sequences: that a row of a segment holds, side by side.
  """

  classes: int
  pool: Pool | None = Mean()

  sequences = 1

  def check(self, embed: Embedding) -> None:
    """Raises ValueError where an embedding has what logits of tokens need."""
    if embed.logits_divisor is not None:
      raise ValueError(
        f'logits_divisor is {embed.logits_divisor}, and the logits of a head '
        'are not divided; leave it out.'
      )
    if embed.own_logits:
      raise ValueError(
        f'{type(embed).__name__} has parameters for logits of tokens, and the '
        'model a head, which has its own; leave out options/embedding_untied.'
      )

  def initial_state(self, rows: int, width: int) -> State:
    """State at the start of so many sequences, of outputs of this width."""
    return () if self.pool is None else self.pool.initial_state(rows, width)

  def __call__(
    self,
    state: State,
    y_BTD: jax.Array,
    mask_BT: jax.Array,
    slots: Callable[[], jax.Array],
  ) -> tuple[State, jax.Array]:
    """The state behind a segment, and logits_BTV float32 of label ids.

    Args:
      state: where the segment before left it.
      y_BTD: outputs for the segment, float32; rows are sequences.
      mask_BT: bool, False at padding.
      slots: gives the memory slots [B, S, D] behind the segment.
    """
    raise NotImplementedError

  @nn.compact
  def logits(self, features_BTF: jax.Array, width: int) -> jax.Array:
    """logits_BTV of label ids, by a hidden layer of this width."""
    if self.classes < 2:
      raise ValueError(
        f'The head has {self.classes} classes; it needs 2 or more. Set CLASSES.'
      )
    two = self.classes == 2
    h_BTD = nn.relu(nn.Dense(width, name='hidden')(features_BTF))
    z_BTV = nn.Dense(1 if two else self.classes, name='output')(h_BTD)
    none_BT1 = jnp.full((*z_BTV.shape[:2], 1), NEVER)
    # The softmax of 0 and z is the sigmoid of z.
    zeros = [jnp.zeros_like(none_BT1)] if two else []
    return jnp.concatenate([none_BT1, *zeros, z_BTV], -1)


class Classifier(Head):
  """Labels of a sequence, or of its tokens."""

  def __call__(self, state, y_BTD, mask_BT, slots):
    if self.pool is not None:
      state, y_BTD = self.pool(state, y_BTD, mask_BT, slots)
    return state, self.logits(y_BTD, y_BTD.shape[-1])


class Matcher(Head):
  """A label of two sequences u and v, from [u; v; u * v; |u - v|].

  Rows 2 b and 2 b + 1 of the outputs are a pair. All logits_BTV of a row of the
  batch, of T places for both, are those behind the segment.
  """

  sequences = 2

  def __call__(self, state, y_BTD, mask_BT, slots):
    if self.pool is None:
      raise ValueError(
        'A Matcher compares two sequences, and its pool is None; set POOL to '
        'one of pooling.py.'
      )
    state, pooled_BTD = self.pool(state, y_BTD, mask_BT, slots)
    D = y_BTD.shape[-1]
    pair_B2D = pooled_BTD[:, -1].reshape(-1, 2, D)
    u_BD, v_BD = pair_B2D[:, 0], pair_B2D[:, 1]
    features_BF = jnp.concatenate(
      [u_BD, v_BD, u_BD * v_BD, jnp.abs(u_BD - v_BD)], -1
    )
    logits_B1V = self.logits(features_BF[:, None], D)
    B, _, V = logits_B1V.shape
    T = 2 * y_BTD.shape[1]
    return state, jnp.broadcast_to(logits_B1V, (B, T, V))
