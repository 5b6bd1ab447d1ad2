"""Metrics that show whether a model uses its recurrent state.

State vectors carry little information if they are all alike, if they never
change, or if tokens attend to all of them equally. The metrics here are cheap,
and every training and evaluation step counts them. The exception is
`row_difference`: only sharded_model.ablations counts it, together with what it
costs to lose the state.
"""

from collections.abc import Callable
import math

from flax import linen as nn
import jax
import jax.numpy as jnp

from meliad_rec.metrics import metrics
from meliad_rec.metrics.metrics import MeanMetric


def sow_states(module: nn.Module, s_BNSD, mask_BN) -> None:
  """Sows 'state_change' and, if there are several slots, 'slot_difference'.

  'state_change' is the difference between a state vector after and before a
  block, relative to the vector after the block. 'slot_difference' compares the
  directions of the vectors after a block: each is divided by its root mean
  square, and the result is the root mean square of their differences from their
  mean. It is 0 if all have one direction, and (1 - 1 / S)^(1/2) if S vectors
  are orthogonal. In both, a vector that is larger than the others counts as
  much as they do. Both are averaged over blocks that hold tokens.

  Args:
    module: the module that sows.
    s_BNSD: state vectors before each block and after the last one; N is the
      number of blocks plus 1.
    mask_BN: bool, True at blocks that hold tokens; N is the number of blocks.
  """
  s_BNSD = jax.lax.stop_gradient(s_BNSD.astype(jnp.float32))
  after, weight_BN = s_BNSD[:, 1:], mask_BN.astype(jnp.float32)
  found = {'state_change': _change(after, s_BNSD[:, :-1])}
  if s_BNSD.shape[2] > 1:
    unit = after / (rms(after, 3)[..., None] + 1e-9)
    found['slot_difference'] = rms(unit - unit.mean(2, keepdims=True), (2, 3))
  for name, value_BN in found.items():
    metrics.sow(module, name, MeanMetric(weight_BN * value_BN, weight_BN))


def sow_gate(module: nn.Module, keep_BSD, mask_BS=None) -> None:
  """Sows 'gate' and 'gate_spread', the mean and standard deviation of a gate.

  Both are computed over the elements of a row, and averaged over rows, with the
  number of their tokens as weights if there is a mask.

  Args:
    module: the module that sows.
    keep_BSD: weights of the old state, from 0 to 1, of shape [B, S, D], where S
      are state vectors or tokens; or [D] if they do not depend on the input.
    mask_BS: bool, False at padding; None means that there is none.
  """
  axes = tuple(range(keep_BSD.ndim))[-2:]
  where, count = None, jnp.ones(keep_BSD.shape[:-2])
  if mask_BS is not None:
    where, count = mask_BS[..., None], mask_BS.sum(1)
  for name, of in ('gate', jnp.mean), ('gate_spread', jnp.std):
    value = of(keep_BSD, axes, where=where)
    total = jnp.where(count > 0, value * count, 0)
    metrics.sow(module, name, MeanMetric(total, count))


def of_real_rows(call: Callable, real_B) -> Callable:
  """Returns `call`, whose means of rows count only rows that are not padding.

  Metrics that do not depend on the input, which have no rows, still count.

  Args:
    call: a method or function whose first argument is a module; the metrics
      that it sows are MeanMetrics.
    real_B: bool, True at rows that hold tokens.
  """
  count = lambda a: jnp.where(real_B, a, 0) if a.ndim else a
  return nn.map_variables(
    call,
    metrics.COLLECTION,
    trans_out_fn=lambda sown: jax.tree.map(count, sown),
    mutable=True,
  )


def sow_attention(module: nn.Module, logits_BHTS, mask_BT) -> None:
  """Sows 'slot_entropy': entropy of attention to S slots, as a share of log(S).

  1 means that all slots have the same weight. The mean is over heads and over
  queries that are not padding. With a single slot, nothing is sown.

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
  entropy_BHT = -jnp.sum(p * jax.nn.log_softmax(logits), -1) / math.log(S)
  real_B1T = jnp.broadcast_to(mask_BT[:, None], entropy_BHT.shape)
  metrics.sow(
    module, 'slot_entropy', MeanMetric(entropy_BHT * real_B1T, real_B1T)
  )


def row_difference(s_BSD, pair_B) -> MeanMetric:
  """Returns how much state vectors differ between a row and the row before it.

  In each slot, the root mean square of the difference between the two rows'
  vectors is divided by the root mean square of the row's vector. The result is
  the mean over slots and rows. It is about 1.4 for independent vectors of mean
  0 and equal size.

  Args:
    s_BSD: state vectors.
    pair_B: bool, True at rows that count. The row before the first one is the
      last one.
  """
  s_BSD, weight_B = s_BSD.astype(jnp.float32), pair_B.astype(jnp.float32)
  difference_B = _change(s_BSD, jnp.roll(s_BSD, 1, 0))
  return MeanMetric(jnp.sum(weight_B * difference_B), jnp.sum(weight_B))


def _change(s_SD, other_SD):
  """Returns the mean over slots S of rms(s_D - other_D) / rms(s_D)."""
  return jnp.mean(rms(s_SD - other_SD, -1) / (rms(s_SD, -1) + 1e-9), -1)


def rms(a, axes=None):
  """Returns the root mean square of `a` over `axes`; None means all axes."""
  return jnp.sqrt(jnp.mean(jnp.square(a), axes))
