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
"""

import dataclasses

from flax import struct
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Halt:
  """How a recurrence halts.

  Attributes:
    threshold: of the sum of weights at which a unit halts.
    penalty: weight of the expected number of steps in the loss.
    bias_init: see gate.HaltingGate.
    keep_crossing: whether the step in which a unit crosses the threshold still
      counts, as in the paper's text. The authors' code throws it away.
    leftover: whether the penalty counts the weight that is left at the end. The
      paper's eq. 8 does not; weight past the last step then costs nothing.
  """

  threshold: float = 0.999
  penalty: float = 0.1
  bias_init: float = 0.0
  keep_crossing: bool = False
  leftover: bool = True

  def __post_init__(self):
    if not 0 < self.threshold < 1:
      raise ValueError(
        f'The threshold is {self.threshold}; it needs a number between 0 and '
        '1. Set HALT_THRESHOLD.'
      )
    if self.penalty < 0:
      raise ValueError(
        f'The penalty is {self.penalty}; it needs 0 or more. Set HALT_PENALTY.'
      )


class Units(struct.PyTreeNode):
  """Where each unit stands: all [B, U] float32."""

  left: jax.Array  # Weight that no state has yet.
  live: jax.Array  # 1 while the unit goes on, 0 for ever after.

  @classmethod
  def first(cls, live_BU) -> 'Units':
    """Those before step 0; live_BU bool: False at padding."""
    left_BU = jnp.ones(live_BU.shape)
    return cls(left_BU, live_BU.astype(jnp.float32))

  @property
  def alive_B(self):
    """Rows in which any unit goes on, bool."""
    return jnp.any(self.live > 0, 1)


class Counts(struct.PyTreeNode):
  """What the steps add up, float32."""

  penalty: jax.Array  # [B, U], weight_l (l + 1).
  depth: jax.Array  # [B, U], steps taken.
  p: jax.Array  # [B, L], p_l, summed over the units that were asked.
  asked: jax.Array  # [B, L], those units.


def advance(
  halt: Halt, units: Units, p_BU, l, most_B1
) -> tuple[Units, jax.Array, jax.Array]:
  """Step l of every unit.

  Args:
    halt: how.
    units: before the step.
    p_BU: float32, probability of halting at h_l.
    l: int, the step, from 0.
    most_B1: int, steps that the units of each row can take, but one.

  Returns:
    Units behind the step; bool [B, U], those that take on the state it makes;
    and the weight of h_l, [B, U], 0 for the others.
  """
  left_BU = units.left * (1 - p_BU)
  live_BU = units.live > 0
  may_BU = live_BU & (l <= most_B1)
  goes_on_BU = may_BU & (left_BU > 1 - halt.threshold)
  takes_BU = may_BU if halt.keep_crossing else goes_on_BU
  weight_BU = jnp.where(takes_BU, units.left * p_BU, 0)
  left_BU = jnp.where(takes_BU, left_BU, units.left)
  units = Units(left_BU, goes_on_BU.astype(jnp.float32))
  return units, takes_BU, weight_BU


def foresee(halt: Halt, units: Units, p_BU, l, most_B1) -> Units:
  """Units before step l, without those that it would halt anyway.

  Where p_l is known before the step, which is then not computed for nothing.
  """
  if halt.keep_crossing:
    return units
  ahead, _, _ = advance(halt, units, p_BU, l, most_B1)
  return units.replace(live=ahead.live)


def at_step(a_BU, l, steps: int):
  """Sums over units [B, L], at the place of step l; nowhere if that is past."""
  at_L = (jnp.arange(steps) == l).astype(jnp.float32)
  return jnp.sum(a_BU, 1, keepdims=True) * at_L


def cost(halt: Halt, left_BU, counts: Counts):
  """The expected number of steps of each unit, [B, U]; see Halt.leftover."""
  if not halt.leftover:
    return counts.penalty
  return counts.penalty + left_BU * counts.depth
