"""When a recurrence in depth halts, and what it yields: the arithmetic.

"Investigating Recurrent Transformers with Dynamic Halt" (2024), eqs. 5-8 and
13-17, its algorithms' indices put right. A unit is what halts by itself: a
token, or a sequence. At step l it has the state h_l, h_0 being the input, and
halts with probability p_l:

  weight_l = left_l p_l        left_0 = 1
  left_{l+1} = left_l (1 - p_l)
  output = sum over l of weight_l h_l, and left_n h_n at the end

so that the weights of all states add up to 1. Everything is float32, and what
is asked is whether `left` is small: in bfloat16 a sum of weights never reaches
a threshold of 0.999.

The probability of halting, from vectors in float32.
"""

import dataclasses

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Halt:
  """How a recurrence halts.

  Attributes:
    threshold: of the sum of weights at which a unit halts.
    ponder_cost: weight of the expected number of steps in the loss.
    bias_init: see gate.HaltingGate.
    keep_crossing: whether the step in which a unit crosses the threshold still
      counts, as in the paper's text. The authors' code throws it away.
    leftover: whether the penalty counts the weight that is left at the end. The
      paper's eq. 8 does not; weight past the last step then costs nothing.
  """

  threshold: float = 0.999
  ponder_cost: float = 0.1
  bias_init: float = 0.0
  keep_crossing: bool = False
  leftover: bool = True

  def __post_init__(self):
    if not 0 < self.threshold < 1:
      raise ValueError(
        f'The threshold is {self.threshold}; it needs a number between 0 and '
        '1. Set HALT_THRESHOLD.'
      )
    if self.ponder_cost < 0:
      raise ValueError(
        f'ponder_cost must be 0 or more, got {self.ponder_cost}. '
        'Set PONDER_COST.'
      )


class Units(struct.PyTreeNode):
  """Where each unit stands: all [B, U] float32."""

  remainder: jax.Array  # Weight that no state has yet.
  active: jax.Array  # 1 while the unit goes on, 0 for ever after.

  @classmethod
  def first(cls, active_BU) -> 'Units':
    """Those before step 0; active_BU bool: False at padding."""
    remainder_BU = jnp.ones(active_BU.shape)
    return cls(remainder_BU, active_BU.astype(jnp.float32))

  @property
  def alive_B(self):
    """Rows in which any unit goes on, bool."""
    return jnp.any(self.active > 0, 1)


class Counts(struct.PyTreeNode):
  """What the steps add up, float32."""

  ponder_cost: jax.Array  # [B, U], weight_l (l + 1).
  depth: jax.Array  # [B, U], steps taken.
  p: jax.Array  # [B, L], p_l, summed over the units that were asked.
  asked: jax.Array  # [B, L], those units.


def advance(
  halt: Halt, units: Units, p_BU, l, max_steps_B1
) -> tuple[Units, jax.Array, jax.Array]:
  """Step l of every unit.

  Args:
    halt: how.
    units: before the step.
    p_BU: float32, probability of halting at h_l.
    l: int, the step, from 0.
    max_steps_B1: int, steps that the units of each row can take, but one.

  Returns:
    Units behind the step; bool [B, U], those that take on the state it makes;
    and the weight of h_l, [B, U], 0 for the others.
  """
  remainder_BU = units.remainder * (1 - p_BU)
  active_BU = units.active > 0
  may_BU = active_BU & (l <= max_steps_B1)
  goes_on_BU = may_BU & (remainder_BU > 1 - halt.threshold)
  takes_BU = may_BU if halt.keep_crossing else goes_on_BU
  weight_BU = jnp.where(takes_BU, units.remainder * p_BU, 0)
  remainder_BU = jnp.where(takes_BU, remainder_BU, units.remainder)
  units = Units(remainder_BU, goes_on_BU.astype(jnp.float32))
  return units, takes_BU, weight_BU


def foresee(halt: Halt, units: Units, p_BU, l, max_steps_B1) -> Units:
  """Units before step l, without those that it would halt anyway.

  Where p_l is known before the step, which is then not computed for nothing.
  """
  if halt.keep_crossing:
    return units
  ahead, _, _ = advance(halt, units, p_BU, l, max_steps_B1)
  return units.replace(active=ahead.active)


def at_step(a_BU, l, steps: int):
  """Sums over units [B, L], at the place of step l; nowhere if that is past."""
  at_L = (jnp.arange(steps) == l).astype(jnp.float32)
  return jnp.sum(a_BU, 1, keepdims=True) * at_L


def cost(halt: Halt, remainder_BU, counts: Counts):
  """The expected number of steps of each unit, [B, U]; see Halt.leftover."""
  if not halt.leftover:
    return counts.ponder_cost
  return counts.ponder_cost + remainder_BU * counts.depth


class HaltingGate(nn.Module):
  """Two linear maps and a sigmoid: p [B, U] of h [B, U, any width].

  "Investigating Recurrent Transformers with Dynamic Halt" (2024), eq. 5.

  Attributes:
    width: hidden units.
    bias_init: the last bias at first. At 0, as in the paper, p is about 0.5 and
      three quarters of the output are those of the first two steps; at -3 a new
      model goes deep, and learns to halt earlier.
  """

  width: int
  bias_init: float = 0.0

  @nn.compact
  def __call__(self, *h_BUX):
    first = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')
    h_BUX = jnp.concatenate([h.astype(jnp.float32) for h in h_BUX], -1)
    hidden = nn.Dense(self.width, kernel_init=first, name='hidden')
    h_BUF = jax.nn.gelu(hidden(h_BUX), approximate=False)
    bias = nn.initializers.constant(self.bias_init)
    last = nn.Dense(1, kernel_init=first, bias_init=bias, name='last')
    return jax.nn.sigmoid(last(h_BUF))[..., 0]


def mean(h_BTD, mask_BT, causal: bool):
  """Means over tokens, float32, padding left out.

  Args:
    h_BTD: vectors.
    mask_BT: False at padding.
    causal: whether each token has the mean of itself and those before it.

  Returns:
    [B, T, D] where causal, else [B, 1, D]; zeros where there is no token.
  """
  mask_BT1 = mask_BT[..., None].astype(jnp.float32)
  h_BTD = h_BTD.astype(jnp.float32) * mask_BT1
  if causal:
    total, count = jnp.cumsum(h_BTD, 1), jnp.cumsum(mask_BT1, 1)
  else:
    total, count = (jnp.sum(a, 1, keepdims=True) for a in (h_BTD, mask_BT1))
  return total / jnp.maximum(count, 1)
