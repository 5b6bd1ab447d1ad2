"""Losses of tokens, in float32: the reported loss and the minimized loss.

The reported loss is always `cross_entropy`. A training step minimizes
`objective`, which may add a z-loss and label smoothing, plus auxiliary losses
that modules sow. An auxiliary loss is a scalar or a `RowMeans`.
"""

from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.kernels.reference import MASKED

HALTING = 'halting'  # Name of the sown ponder loss.


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
  """Returns the loss of each token in nats, -ln p(target): [B, T].

  Args:
    logits_BTV: logits of any float dtype; the loss is computed in float32.
    targets_BT: ids. An id outside the vocabulary gives NaN, because a compiled
      step cannot raise an error; the trainer stops at NaN.
  """
  log_z_BT, target_BT = _parts(logits_BTV, targets_BT)
  return log_z_BT - target_BT


def objective(
  logits_BTV: jax.Array,
  targets_BT: jax.Array,
  z_loss: float = 0.0,
  label_smoothing: float = 0.0,
  smooth_target: bool = True,
) -> jax.Array:
  """Returns the loss to minimize for each token, in nats: [B, T].

  If z_loss and label_smoothing are 0, the result is exactly `cross_entropy`.

  Args:
    logits_BTV: logits of any float dtype; the loss is computed in float32.
    targets_BT: ids. An id outside the vocabulary gives NaN.
    z_loss: weight of the term (ln Z)^2, which keeps logits from drifting; Z is
      the sum of exp(logits). Chowdhery et al. 2022, section 5, use 1e-4.
    label_smoothing: share of the target's probability that is spread evenly
      over the vocabulary, except over ids that are masked (whose logit is the
      constant MASKED; Szegedy et al. 2016, section 7). The entropy of the
      smoothed target is not subtracted.
    smooth_target: whether the target gets an even part of this share too. If
      False, only the other ids get it, as in fairseq.

  Raises:
    ValueError: z_loss is below 0, or label_smoothing is outside [0, 1).
  """
  if z_loss < 0:
    raise ValueError(
      f'z_loss must be at least 0, got {z_loss}. Set losses.objective.z_loss.'
    )
  if not 0 <= label_smoothing < 1:
    raise ValueError(
      f'label_smoothing must be at least 0 and below 1, got {label_smoothing}. '
      'Set losses.objective.label_smoothing.'
    )
  log_z_BT, target_BT = _parts(logits_BTV, targets_BT)
  nats_BT = log_z_BT - target_BT
  if label_smoothing:
    # Heads set the logits of ids that are not labels to MASKED.
    can_be_BTV = logits_BTV > MASKED / 2
    mean_BT = jnp.mean(logits_BTV, -1, dtype=jnp.float32, where=can_be_BTV)
    even_BT = log_z_BT - mean_BT
    share = label_smoothing
    if not smooth_target:
      count_BT = jnp.sum(can_be_BTV, -1)
      share = share * count_BT / (count_BT - 1)
    nats_BT = (1 - share) * nats_BT + share * even_BT
  if z_loss:
    nats_BT = nats_BT + z_loss * jnp.square(log_z_BT)
  return nats_BT


def correct(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
  """Returns whether the most likely token is the target: bool [B, T].

  Of equally likely tokens, the one with the lowest id is the most likely, as in
  argmax. The function compares maxima instead of calling argmax. XLA fuses
  maxima with other work, while argmax would read the logits once more.
  """
  logits_BTV = logits_BTV.astype(jnp.float32)
  is_earlier_BTV = jnp.arange(logits_BTV.shape[-1]) < targets_BT[..., None]
  earlier_BTV = jnp.where(is_earlier_BTV, logits_BTV, -jnp.inf)
  target_BT = _target_logits(logits_BTV, targets_BT)
  beats_earlier_BT = target_BT > jnp.max(earlier_BTV, axis=-1)
  return beats_earlier_BT & (target_BT >= jnp.max(logits_BTV, axis=-1))


def masked_sum(values_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """Returns the float32 sum of the values where the mask is True.

  All other values are ignored, even if they are NaN.
  """
  return jnp.sum(jnp.where(mask_BT, values_BT, 0), dtype=jnp.float32)


def masked_mean(values_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """Returns the float32 mean of the values where the mask is True.

  If the mask is False everywhere, the result and its gradient are 0.
  """
  count = jnp.maximum(jnp.sum(mask_BT), 1)
  return masked_sum(values_BT, mask_BT) / count


class RowMeans(struct.PyTreeNode):
  """A loss averaged within each row, and then over rows with equal weights.

  `total_B` is the sum of the loss over the terms of each row, and `count_B` is
  the number of terms; rows of count 0 are left out. Both are float32 [..., B].
  Leading axes come from scans, for example over chunks; `mean` first sums over
  them. A scan may multiply both arrays by the same factor, which does not
  change the mean.
  """

  total_B: jax.Array  # Sum of the loss over the terms of each row.
  count_B: jax.Array  # Number of terms in each total; 0 if the row has none.

  def mean(self) -> jax.Array:
    """Returns the mean, a float32 scalar.

    If all counts are 0, the mean and its gradient are 0.
    """
    total_B, count_B = (
      jnp.sum(a.reshape(-1, a.shape[-1]), 0)
      for a in (self.total_B, self.count_B)
    )
    mean_B = total_B / jnp.where(count_B > 0, count_B, 1)
    return masked_mean(mean_B, count_B > 0)


def _parts(logits_BTV, targets_BT):
  """Returns ln(sum of exp(logits)) and the target's logit: float32 [B, T]."""
  logits_BTV = logits_BTV.astype(jnp.float32)
  log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
  return log_z_BT, _target_logits(logits_BTV, targets_BT)


def _target_logits(logits_BTV, targets_BT):
  """Returns the logit of each target: [B, T], NaN for an unknown id."""
  V = logits_BTV.shape[-1]
  # A comparison fuses with the sum and shards over V; a gather's gradient
  # would be a scatter into [B, T, V].
  is_target_BTV = jnp.arange(V) == targets_BT[..., None]
  target_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0), axis=-1)
  is_known_BT = (targets_BT >= 0) & (targets_BT < V)
  return jnp.where(is_known_BT, target_BT, jnp.nan)
