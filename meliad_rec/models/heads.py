"""Heads, which compute logits of labels of tokens, sequences or pairs.

A model with a head predicts labels instead of the next token. A head is a
linear map, a ReLU and a linear map, as in the code of Ray Chowdhury and Caragea
2024. There are logits for the label ids from 0 to `classes`. Id 0 means no
label, and its logit is the constant MASKED. For two classes, the last map has a
single output z, and ids 1 and 2 have the logits 0 and z. Gradients stop at the
start of a segment, so a pool passes none to earlier segments.
"""

from collections.abc import Callable
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp

from meliad_rec.kernels.reference import MASKED
from meliad_rec.layers.encoder_layer import UNIFORM
from meliad_rec.models.cell import State
from meliad_rec.models.embedding import Embedding
from meliad_rec.models.pooling import Mean
from meliad_rec.models.pooling import Pool


class Head(nn.Module):
  """Base class of heads. State: the state of the pool.

  Attributes:
    classes: number of classes; their labels are the ids from 1 to `classes`.
    pool: a pool of pooling.py, which reduces a sequence to one vector. None
      means that each token has a label.
    sequences: number of sequences side by side in each row of a segment: 2 if
      the head labels pairs, else 1.
  """

  classes: int
  pool: Pool | None = Mean()

  sequences = 1

  def check(self, embed: Embedding) -> None:
    """Raises ValueError if an embedding is set up for next-token logits."""
    if embed.logits_divisor is not None:
      raise ValueError(
        f'logits_divisor is {embed.logits_divisor}, but the logits of a head '
        'are not divided. Remove model.Model.logits_divisor.'
      )
    if embed.has_output_params:
      raise ValueError(
        f'{type(embed).__name__} has parameters for logits of the next token, '
        f'but this model predicts labels with a {type(self).__name__}. Remove '
        'options/embedding/untied.'
      )

  def initial_state(self, rows: int, width: int) -> State:
    """Returns the state at the start of `rows` sequences; D = width."""
    return () if self.pool is None else self.pool.initial_state(rows, width)

  def __call__(
    self,
    state: State,
    y_BTD: jax.Array,
    mask_BT: jax.Array,
    slots: Callable[[], jax.Array],
  ) -> tuple[State, jax.Array]:
    """Returns the state after a segment, and logits_BTV float32 of labels.

    Args:
      state: the state before the segment.
      y_BTD: outputs of the segment, float32; each row is one sequence.
      mask_BT: bool, False at padding.
      slots: function that returns the memory slots [B, S, D] after the segment.
    """
    raise NotImplementedError

  @nn.compact
  def logits(self, features_BTF: jax.Array, width: int) -> jax.Array:
    """Returns logits_BTV of label ids.

    Args:
      features_BTF: input vectors of any width.
      width: number of hidden units.

    Raises:
      ValueError: there are fewer than 2 classes.
    """
    if self.classes < 2:
      raise ValueError(
        f'classes must be at least 2, got {self.classes}. Set CLASSES.'
      )
    two = self.classes == 2
    dense = functools.partial(nn.Dense, kernel_init=UNIFORM)
    h_BTD = nn.relu(dense(width, name='hidden')(features_BTF))
    z_BTV = dense(1 if two else self.classes, name='output')(h_BTD)
    none_BT1 = jnp.full((*z_BTV.shape[:2], 1), MASKED)
    # The softmax of 0 and z is the sigmoid of z.
    zeros = [jnp.zeros_like(none_BT1)] if two else []
    return jnp.concatenate([none_BT1, *zeros, z_BTV], -1)


class Classifier(Head):
  """Head that labels a sequence, or each token if `pool` is None."""

  def __call__(self, state, y_BTD, mask_BT, slots):
    if self.pool is not None:
      state, y_BTD = self.pool(state, y_BTD, mask_BT, slots)
    return state, self.logits(y_BTD, y_BTD.shape[-1])


class Matcher(Head):
  """Head that labels a pair of sequences.

  Rows 2 b and 2 b + 1 of y_BTD are the two sequences of pair b. The first
  linear map takes [u; v; u * v; |u - v|], where u and v are the pooled vectors
  of the two sequences after the segment. The resulting logits of a pair are
  repeated at the positions of both sequences: [B, 2 T, V], where B is the
  number of pairs.
  """

  sequences = 2

  def __call__(self, state, y_BTD, mask_BT, slots):
    if self.pool is None:
      raise ValueError(
        'A Matcher needs a pool, got None. Set POOL, for example with '
        '--gin_file=options/pool/mean.'
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
