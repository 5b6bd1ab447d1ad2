"""Metrics that show whether a model uses its recurrent state.

State vectors that are all alike, that never change, or to which tokens attend
uniformly carry little. All metrics here are cheap, and are counted in every
training step and evaluation; evaluation.py adds what it costs to clear the
states.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from meliad_rec.metrics import metrics
from meliad_rec.metrics.metrics import MeanMetric


def sow_states(module: nn.Module, s_BNSD, mask_BN) -> None:
  """Sows how much state vectors differ from block to block and among slots.

  Both differences are root mean squares relative to that of the states.

  Args:
    module: the module that sows.
    s_BNSD: state vectors before each of N - 1 blocks and after the last one.
    mask_BN: bool, whether each of the N - 1 blocks has any tokens.
  """
  s_BNSD = jax.lax.stop_gradient(s_BNSD.astype(jnp.float32))
  after, weight_BN = s_BNSD[:, 1:], mask_BN.astype(jnp.float32)
  size_BN = rms(after, (2, 3)) + 1e-9
  found = {'state_change': rms(after - s_BNSD[:, :-1], (2, 3))}
  if s_BNSD.shape[2] > 1:
    center = after.mean(2, keepdims=True)
    found['slot_difference'] = rms(after - center, (2, 3))
  for name, difference_BN in found.items():
    metrics.sow(
      module, name, MeanMetric(weight_BN * difference_BN / size_BN, weight_BN)
    )


def sow_gate(module: nn.Module, keep_BSD) -> None:
  """Sows the mean and the standard deviation of a gate.

  Args:
    module: the module that sows.
    keep_BSD: weights of the old state, from 0 to 1, of shape [B, S, D]; or [D]
      if they do not depend on the input.
  """
  axes = tuple(range(keep_BSD.ndim))[-2:]
  if keep_BSD.ndim == 1:
    axes = (0,)
  count = jnp.ones_like(keep_BSD.mean(axes))
  metrics.sow(module, 'gate', MeanMetric(keep_BSD.mean(axes), count))
  metrics.sow(module, 'gate_spread', MeanMetric(keep_BSD.std(axes), count))


def sow_attention(module: nn.Module, logits_BHTS, mask_BT) -> None:
  """Sows the entropy of attention to S slots, as a share of log(S).

  1 means that all slots have the same weight.

  Args:
    module: the module that sows.
    logits_BHTS: logits of T queries; all slots are visible.
    mask_BT: bool, False at padding.
  """
  logits = jax.lax.stop_gradient(logits_BHTS.astype(jnp.float32))
  S = logits.shape[-1]
  if S < 2:
    return
  p = jax.nn.softmax(logits)
  entropy_BHT = -jnp.sum(p * jax.nn.log_softmax(logits), -1) / jnp.log(S)
  real_B1T = jnp.broadcast_to(mask_BT[:, None], entropy_BHT.shape)
  metrics.sow(
    module, 'slot_entropy', MeanMetric(entropy_BHT * real_B1T, real_B1T)
  )


def row_difference(s_BSD, pair_B) -> MeanMetric:
  """Returns how much the state vectors of a row differ from the row before it.

  It is the root mean square of the differences relative to that of the states;
  for independent states of mean 0 it is about 1.4.

  Args:
    s_BSD: state vectors.
    pair_B: bool, whether this row and the one before it count. The row before
      the first one is the last.
  """
  s_BSD, weight_B = s_BSD.astype(jnp.float32), pair_B.astype(jnp.float32)
  difference_B = rms(s_BSD - jnp.roll(s_BSD, 1, 0), (1, 2))
  size_B = rms(s_BSD, (1, 2)) + 1e-9
  return MeanMetric(
    jnp.sum(weight_B * difference_B / size_B), jnp.sum(weight_B)
  )


def rms(a, axes=None):
  """Returns the root mean square over some axes; None means all."""
  return jnp.sqrt(jnp.mean(jnp.square(a), axes))
