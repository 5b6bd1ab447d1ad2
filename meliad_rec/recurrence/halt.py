"""Arithmetic of halting: when a recurrence in depth halts, and its output.

"Investigating Recurrent Transformers with Dynamic Halt" (2024), eqs. 5-8 and
13-17, with the indices in the paper's algorithms corrected. A unit is what
halts as a whole: a token, or all tokens of a row. U is the number of units in a
row, L the maximum number of steps. Before step l, counted from 0, a unit has
the state h_l, where h_0 is the input, and it halts with probability p_l:

  weight_l = remainder_l p_l        remainder_0 = 1
  remainder_{l+1} = remainder_l (1 - p_l)
  output after n steps = sum over l < n of weight_l h_l, plus remainder_n h_n

so that the weights of all states, including remainder_n, add up to 1. A unit
halts as soon as the weights of its states add up to a threshold, such as 0.999.
Everything is float32, since in bfloat16 the sum would never reach 0.999.
"""

import dataclasses

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Halt:
  """Settings of halting.

  Attributes:
    threshold: sum of the weights of a unit's states at which the unit halts
      (Graves 2016: 1 - epsilon).
    ponder_cost: weight of the expected number of steps in the loss (Graves
      2016: the time penalty).
    bias_init: see HaltingGate.
    keep_crossing: whether a unit still takes the new state of the step in which
      it crosses the threshold, as in the paper's text. The authors' code
      discards that state.
    leftover: whether the remainder after the last step counts in the expected
      number of steps; see `expected_steps`. In the paper's eq. 8 it does not,
      and halting at the initial state costs nothing.
    length_bound: whether a unit of an encoder takes at most one step more than
      the row has tokens, as in the authors' code. The paper's algorithms have
      no such bound.
  """

  threshold: float = 0.999
  ponder_cost: float = 0.1
  bias_init: float = 0.0
  keep_crossing: bool = False
  leftover: bool = True
  length_bound: bool = True

  def __post_init__(self):
    if not 0 < self.threshold < 1:
      raise ValueError(
        f'threshold must be above 0 and below 1, got {self.threshold}. '
        'Set HALT_THRESHOLD.'
      )
    if self.ponder_cost < 0:
      raise ValueError(
        f'ponder_cost must be at least 0, got {self.ponder_cost}. '
        'Set PONDER_COST.'
      )


class Units(struct.PyTreeNode):
  """Progress of each unit; both arrays are [B, U] float32.

  Attributes:
    remainder: weight not yet given to any state.
    active: 1 until the unit halts, then 0.
  """

  remainder: jax.Array
  active: jax.Array

  @classmethod
  def initial(cls, active_BU) -> 'Units':
    """Returns the units before step 0.

    Args:
      active_BU: bool, False at units that are padding.
    """
    remainder_BU = jnp.ones(active_BU.shape)
    return cls(remainder_BU, active_BU.astype(jnp.float32))

  @property
  def active_B(self):
    """Whether any unit of a row is active, [B] bool."""
    return jnp.any(self.active > 0, 1)


class Counts(struct.PyTreeNode):
  """Terms of one step, or sums over steps; all float32.

  U is the number of units of a row, L the maximum number of steps. In step l,
  counted from 0, a unit has the halting probability p_l, and weight_l is the
  weight of the unit's state before the step.

  Attributes:
    expected_steps: [B, U], sum over steps of weight_l (l + 1).
    depth: [B, U], number of steps taken.
    p: [B, L], for each step l the sum of p_l over the units that were still
      active when p_l was computed.
    evaluated: [B, L], for each step the number of these units.
  """

  expected_steps: jax.Array
  depth: jax.Array
  p: jax.Array
  evaluated: jax.Array


def advance(
  halt: Halt, units: Units, p_BU, l, last_step_B1
) -> tuple[Units, jax.Array, jax.Array]:
  """Decides which units take step l and which halt, and updates their progress.

  Args:
    halt: settings.
    units: units before the step.
    p_BU: float32, probability of halting at the state before the step.
    l: int, the step, from 0.
    last_step_B1: int, index, from 0, of the last step that the units of a row
      may take.

  Returns:
    The units after the step; bool [B, U], True at units that take the new
    state; and the weight of the state before the step, float32 [B, U], 0 at
    units that do not take the new state.
  """
  remainder_BU = units.remainder * (1 - p_BU)
  active_BU = units.active > 0
  may_BU = active_BU & (l <= last_step_B1)
  continues_BU = may_BU & (remainder_BU > 1 - halt.threshold)
  updated_BU = may_BU if halt.keep_crossing else continues_BU
  weight_BU = jnp.where(updated_BU, units.remainder * p_BU, 0)
  remainder_BU = jnp.where(updated_BU, remainder_BU, units.remainder)
  units = Units(remainder_BU, continues_BU.astype(jnp.float32))
  return units, updated_BU, weight_BU


def halt_ahead(halt: Halt, units: Units, p_BU, l, last_step_B1) -> Units:
  """Returns the units; those that step l would halt are no longer active.

  If p_BU is known before the step, this saves steps in which units would only
  find that they halt. With `Halt.keep_crossing`, units still take the new
  states of these steps, so they are returned unchanged. The arguments are those
  of `advance`.
  """
  if halt.keep_crossing:
    return units
  ahead, _, _ = advance(halt, units, p_BU, l, last_step_B1)
  return units.replace(active=ahead.active)


def at_step(a_BU, l, steps: int):
  """Returns [B, steps]: in column l the sum of a_BU over units, elsewhere 0."""
  at_L = (jnp.arange(steps) == l).astype(jnp.float32)
  return jnp.sum(a_BU, 1, keepdims=True) * at_L


def expected_steps(halt: Halt, remainder_BU, counts: Counts):
  """Returns each unit's expected number of steps, [B, U].

  If Halt.leftover, it is Counts.expected_steps plus the remainder times the
  number of steps taken. Otherwise it is eq. 8, the sum over steps of
  weight_l l.

  Args:
    halt: settings.
    remainder_BU: weight that no step has given to a state.
    counts: counts of all steps.
  """
  if not halt.leftover:
    return counts.expected_steps - (1 - remainder_BU)
  return counts.expected_steps + remainder_BU * counts.depth


class HaltingGate(nn.Module):
  """Map from states [B, U, any width] to halting probabilities p [B, U].

  It is an MLP with one hidden layer, followed by a sigmoid. If several arrays
  of states are given, they are concatenated along the last axis. "Investigating
  Recurrent Transformers with Dynamic Halt" (2024), eq. 5.

  Attributes:
    width: number of hidden units.
    bias_init: initial bias of the last linear map. At 0, as in the paper, p is
      about 0.5 in a new model, and three quarters of the output come from the
      first two states. At -3 a new model takes many steps, and learns to halt
      earlier.
  """

  width: int
  bias_init: float = 0.0

  @nn.compact
  def __call__(self, *h_BUX):
    init = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')
    h_BUX = jnp.concatenate([h.astype(jnp.float32) for h in h_BUX], -1)
    hidden = nn.Dense(self.width, kernel_init=init, name='hidden')
    h_BUF = jax.nn.gelu(hidden(h_BUX), approximate=False)
    bias = nn.initializers.constant(self.bias_init)
    last = nn.Dense(1, kernel_init=init, bias_init=bias, name='last')
    return jax.nn.sigmoid(last(h_BUF))[..., 0]


def mean_state(h_BTD, mask_BT, causal: bool):
  """Returns means over tokens that are not padding, float32.

  Args:
    h_BTD: vectors.
    mask_BT: bool, False at padding.
    causal: whether the mean at each token covers only it and earlier tokens.

  Returns:
    [B, T, D] if causal, else [B, 1, D]; zeros where a mean is over no token.
  """
  mask_BT1 = mask_BT[..., None].astype(jnp.float32)
  h_BTD = h_BTD.astype(jnp.float32) * mask_BT1
  if causal:
    total, count = jnp.cumsum(h_BTD, 1), jnp.cumsum(mask_BT1, 1)
  else:
    total, count = (jnp.sum(a, 1, keepdims=True) for a in (h_BTD, mask_BT1))
  return total / jnp.maximum(count, 1)
