"""Token losses in float32: what is reported, and what is minimised.

`cross_entropy` is the figure that is reported, always the plain one.
`objective` is what a step minimises; it may add a z-loss and smooth labels.
`RowMeans` is what a module may sow to be minimised beside them.
"""

from flax import struct
import jax
import jax.numpy as jnp

from meliad_rec.kernels.reference import NEVER

HALTING = 'halting'  # The name under which the loss of halting is sown.


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
  """Nats of each token: [B, T], -ln p(target).

  Args:
    logits_BTV: any float dtype; computed in float32.
    targets_BT: ids. An id outside the vocabulary gives NaN, since a compiled
      step cannot raise, and a NaN loss stops the run.
  """
  log_z_BT, target_BT = _parts(logits_BTV, targets_BT)
  return log_z_BT - target_BT


def objective(
  logits_BTV: jax.Array,
  targets_BT: jax.Array,
  z_loss: float = 0.0,
  label_smoothing: float = 0.0,
) -> jax.Array:
  """Nats of each token to minimise: [B, T].

  Args:
    logits_BTV: any float dtype; computed in float32.
    targets_BT: ids within the vocabulary, or the token's value is NaN.
    z_loss: weight of (ln Z)^2, which keeps logits from drifting (Chowdhery et
      al. 2022, section 5: 1e-4).
    label_smoothing: share of the target's probability that is spread evenly
      over the vocabulary. The entropy of that target is not subtracted.

  Returns:
    With both at 0, exactly `cross_entropy`.

  Raises:
    ValueError: z_loss below 0, or label_smoothing outside [0, 1).
  """
  if z_loss < 0:
    raise ValueError(
      f'z_loss is {z_loss}; it needs a weight of 0 or more. Set z_loss.'
    )
  if not 0 <= label_smoothing < 1:
    raise ValueError(
      f'label_smoothing is {label_smoothing}; it needs a share from 0 to below '
      '1. Set label_smoothing.'
    )
  log_z_BT, target_BT = _parts(logits_BTV, targets_BT)
  nats_BT = log_z_BT - target_BT
  if label_smoothing:
    # A head gives ids that are no label a logit of NEVER.
    can_be_BTV = logits_BTV > NEVER / 2
    mean_BT = jnp.mean(logits_BTV, -1, dtype=jnp.float32, where=can_be_BTV)
    even_BT = log_z_BT - mean_BT
    nats_BT = (1 - label_smoothing) * nats_BT + label_smoothing * even_BT
  if z_loss:
    nats_BT = nats_BT + z_loss * jnp.square(log_z_BT)
  return nats_BT


def correct(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
  """Whether the likeliest token is the target: [B, T] bool."""
  return jnp.argmax(logits_BTV, axis=-1) == targets_BT


def masked_sum(values_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """Sum where the mask is True, float32; the rest, even NaN, is nothing."""
  return jnp.sum(jnp.where(mask_BT, values_BT, 0), dtype=jnp.float32)


def masked_mean(values_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """Mean where the mask is True, float32; 0, without gradient, if nowhere."""
  count = jnp.maximum(jnp.sum(mask_BT), 1)
  return masked_sum(values_BT, mask_BT) / count


class RowMeans(struct.PyTreeNode):
  """A loss that is a mean in each row, and then of rows, which weigh alike.

  Both are [..., B] float32, the same; axes in front of rows are of the runs of
  a module in a scan, such as chunks. A scan may scale both alike.
  """

  total_B: jax.Array
  count_B: jax.Array  # What each total is of, or a part; 0: nothing.

  def mean(self) -> jax.Array:
    """Float32 scalar; 0, without gradient, of nothing."""
    total_B, count_B = (
      jnp.sum(a.reshape(-1, a.shape[-1]), 0)
      for a in (self.total_B, self.count_B)
    )
    mean_B = total_B / jnp.where(count_B > 0, count_B, 1)
    return masked_mean(mean_B, count_B > 0)


def _parts(logits_BTV, targets_BT):
  """ln Z and the target's logit, both [B, T] float32."""
  logits_BTV = logits_BTV.astype(jnp.float32)
  V = logits_BTV.shape[-1]
  # A comparison fuses with the sum and shards over V; a gather's gradient
  # would be a scatter into [B, T, V].
  is_target_BTV = jnp.arange(V) == targets_BT[..., None]
  target_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0), axis=-1)
  known_BT = (targets_BT >= 0) & (targets_BT < V)
  target_BT = jnp.where(known_BT, target_BT, jnp.nan)
  return jax.nn.logsumexp(logits_BTV, axis=-1), target_BT
