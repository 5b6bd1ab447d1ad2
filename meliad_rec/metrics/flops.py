"""FLOPs of a traced function, counted on its matrix products.

Peak speed of the chips that are known.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import math

import jax
from jax.extend import core
import numpy as np


def forward_flops(function: Callable, *arguments) -> int:
  """Floating-point operations of all matrix products of one call.

  A multiplication and an addition are two operations; what a scan repeats is
  counted as often; of the branches of a condition, the dearest. The body of a
  `while` counts as often as it may run at most, or once where no trace tells
  that. Arguments may be shapes alone.
  """
  return count(jax.make_jaxpr(function)(*arguments).jaxpr, turns=None)


def count(jaxpr: core.Jaxpr, turns: float | None) -> float:
  """`forward_flops` of a trace, each `while` of which runs `turns` times.

  Args:
    jaxpr: the trace.
    turns: None: as often as each may at most, or once where that is not known.
  """
  total = 0
  for equation in jaxpr.eqns:
    inner = [count(sub, turns) for sub in _jaxprs(equation.params.values())]
    match equation.primitive.name:
      case 'dot_general':
        total += _product(equation)
      case 'ragged_dot_general' | 'ragged_dot':
        # Each row meets the matrix of its group.
        depth = equation.invars[0].aval.shape[-1]
        total += 2 * depth * math.prod(equation.outvars[0].aval.shape)
      case 'scan':
        total += equation.params['length'] * sum(inner)
      case 'while':
        often = _most(equation) or 1 if turns is None else turns
        total += often * sum(inner)
      case 'cond':
        total += max(inner)
      case _:
        total += sum(inner)
  return total


def loops(jaxpr: core.Jaxpr) -> list[int | None]:
  """Turns that each `while` of a trace may take; None: it does not tell.

  Of those that have products.
  """
  found = []
  for equation in jaxpr.eqns:
    inside = [*_jaxprs(equation.params.values())]
    multiplies = any(count(inner, None) for inner in inside)
    if equation.primitive.name == 'while' and multiplies:
      found.append(_most(equation))
    for inner in inside:
      found += loops(inner)
  return found


def _most(equation) -> int | None:
  """Turns that a `while` may take; None: its trace does not tell.

  It tells where the loop goes on only while what it counts its turns by, which
  is taken to be 0 at first, is less than a number.
  """
  condition = equation.params['cond_jaxpr'].jaxpr
  made = {one.outvars[0]: one for one in condition.eqns}
  carried = condition.invars[equation.params['cond_nconsts'] :]
  bounds = [
    number
    for counter, number in _limits(condition.outvars[0], made)
    if counter in carried and _counts(equation, carried.index(counter))
  ]
  return min(bounds, default=None)


def _limits(result, made: Mapping) -> Iterator[tuple[core.Var, int]]:
  """Values and the numbers that they must be less than, for a result to hold.

  Args:
    result: of a condition.
    made: equations by what they give.
  """
  one = made.get(result) if isinstance(result, core.Var) else None
  match one and one.primitive.name:
    case 'and' | 'convert_element_type':
      for part in one.invars:
        yield from _limits(part, made)
    case 'lt' if isinstance(one.invars[1], core.Literal):
      if np.issubdtype(one.invars[1].aval.dtype, np.integer):
        yield one.invars[0], int(one.invars[1].val)


def _counts(equation, place: int) -> bool:
  """Whether a `while` adds 1 in each turn to what it carries there."""
  body = equation.params['body_jaxpr'].jaxpr
  before = body.invars[equation.params['body_nconsts'] + place]
  return any(
    one.primitive.name == 'add'
    and one.outvars[0] is body.outvars[place]
    and one.invars[0] is before
    and isinstance(one.invars[1], core.Literal)
    and one.invars[1].val == 1
    for one in body.eqns
  )


def _product(equation) -> int:
  (contracted, _), _ = equation.params['dimension_numbers']
  shape = equation.invars[0].aval.shape
  depth = math.prod(shape[axis] for axis in contracted)
  return 2 * depth * math.prod(equation.outvars[0].aval.shape)


def _jaxprs(values):
  for value in values:
    if isinstance(value, core.ClosedJaxpr):
      yield value.jaxpr
    elif isinstance(value, core.Jaxpr):
      yield value
    elif isinstance(value, tuple | list):
      yield from _jaxprs(value)


# Dense bfloat16 FLOP/s of one JAX device, from the makers' data sheets. The
# key begins `device_kind`; the longest key that fits counts.
PEAK_FLOPS = {
  'TPU v2': 22.5e12,  # A device is a core, half a chip.
  'TPU v3': 61.5e12,  # A device is a core, half a chip.
  'TPU v4': 275e12,
  'TPU v4 lite': 138e12,
  'TPU v5 lite': 197e12,
  'TPU v5e': 197e12,
  'TPU v5': 459e12,  # What a v5p calls itself.
  'TPU v6 lite': 918e12,
  'TPU v6e': 918e12,
  'TPU7x': 1153.5e12,  # A device is a core, half a chip.
  'NVIDIA A100': 312e12,
  'NVIDIA H100': 989e12,
  'NVIDIA H100 PCIe': 756e12,
  'NVIDIA H100 NVL': 835e12,
  'NVIDIA H200': 989e12,
}


def peak_flops(devices: Sequence[jax.Device]) -> float | None:
  """Dense bfloat16 FLOP/s of the devices together; None if one is unknown."""
  peaks = [_peak(device.device_kind) for device in devices]
  return None if None in peaks else sum(peaks)


def _peak(kind):
  fitting = [name for name in PEAK_FLOPS if kind.startswith(name)]
  return PEAK_FLOPS[max(fitting, key=len)] if fitting else None
