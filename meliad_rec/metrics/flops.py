"""FLOPs of a traced function, and the peak FLOP/s of known chips."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import math

import jax
from jax.extend import core
from jax.interpreters import partial_eval
import numpy as np


def forward_flops(function: Callable, *arguments) -> int:
  """Counts the floating-point operations of all matrix products of one call.

  A multiplication and an addition are two operations. The body of a `scan`
  counts once for each iteration. Of the branches of a `cond`, only the most
  expensive one counts. The body of a `while` counts for its maximum number of
  iterations, or once if the trace shows no maximum. Arguments may be
  jax.ShapeDtypeStruct.
  """
  return count(trace(function, *arguments), turns=None)


def trace(function: Callable, *arguments) -> core.Jaxpr:
  """Returns the trace of a call, without operations whose results are unused.

  Arguments may be jax.ShapeDtypeStruct.
  """
  jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
  return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def count(jaxpr: core.Jaxpr, turns: float | None) -> float:
  """Counts the FLOPs of a trace, as `forward_flops` does.

  Args:
    jaxpr: the trace.
    turns: number of iterations assumed for each `while`. None means the maximum
      of each `while`, or 1 if the maximum is unknown.
  """
  total = 0
  for equation in jaxpr.eqns:
    inner = [count(sub, turns) for sub in _jaxprs(equation.params.values())]
    match equation.primitive.name:
      case 'dot_general':
        total += _product(equation)
      case 'ragged_dot_general' | 'ragged_dot':
        # Each row is multiplied by the matrix of its group.
        depth = equation.invars[0].aval.shape[-1]
        total += 2 * depth * math.prod(equation.outvars[0].aval.shape)
      case 'scan':
        total += equation.params['length'] * sum(inner)
      case 'while':
        repeats = _max_turns(equation) or 1 if turns is None else turns
        total += repeats * sum(inner)
      case 'cond':
        total += max(inner)
      case _:
        total += sum(inner)
  return total


def loops(jaxpr: core.Jaxpr) -> list[int | None]:
  """Returns a number for each `while` whose body has matrix products.

  It is the maximum number of iterations, or None if the trace shows no maximum.
  """
  found = []
  for equation in jaxpr.eqns:
    inside = [*_jaxprs(equation.params.values())]
    multiplies = any(count(inner, None) for inner in inside)
    if equation.primitive.name == 'while' and multiplies:
      found.append(_max_turns(equation))
    for inner in inside:
      found += loops(inner)
  return found


def _max_turns(equation) -> int | None:
  """Returns the maximum number of iterations of a `while`, or None if unknown.

  It is known if the loop continues only while a counter is less than a
  constant. A counter is a value to which each iteration adds 1. It is assumed
  to start at 0.
  """
  condition = equation.params['cond_jaxpr'].jaxpr
  producers = {one.outvars[0]: one for one in condition.eqns}
  carried = condition.invars[equation.params['cond_nconsts'] :]
  bounds = [
    number
    for counter, number in _limits(condition.outvars[0], producers)
    if counter in carried and _counts(equation, carried.index(counter))
  ]
  return min(bounds, default=None)


def _limits(result, producers: Mapping) -> Iterator[tuple[core.Var, int]]:
  """Yields (variable, constant) for comparisons that a boolean implies.

  Each comparison is `variable < constant`.

  Args:
    result: the boolean, which is True only if all these comparisons hold.
    producers: {first output of an equation: the equation} for the trace.
  """
  one = producers.get(result) if isinstance(result, core.Var) else None
  match one and one.primitive.name:
    case 'and' | 'convert_element_type':
      for part in one.invars:
        yield from _limits(part, producers)
    case 'lt' if isinstance(one.invars[1], core.Literal):
      if np.issubdtype(one.invars[1].aval.dtype, np.integer):
        yield one.invars[0], int(one.invars[1].val)


def _counts(equation, place: int) -> bool:
  """Returns whether each iteration of a `while` adds 1 to one carried value.

  Args:
    equation: the `while`.
    place: index of the value among the carried values.
  """
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


# Dense bfloat16 FLOP/s of one JAX device, from the makers' data sheets, by the
# beginning of its `device_kind`. The longest key that matches counts.
PEAK_FLOPS = {
  'TPU v2': 22.5e12,  # A device is a core, half a chip.
  'TPU v3': 61.5e12,  # A device is a core, half a chip.
  'TPU v4': 275e12,
  'TPU v4 lite': 138e12,
  'TPU v5 lite': 197e12,
  'TPU v5e': 197e12,
  'TPU v5': 459e12,  # The device_kind of a v5p.
  'TPU v6 lite': 918e12,
  'TPU v6e': 918e12,
  'TPU7x': 1153.5e12,  # A device is a core, half a chip.
  'NVIDIA A100': 312e12,
  'NVIDIA H100': 989e12,
  'NVIDIA H100 PCIe': 756e12,
  'NVIDIA H100 NVL': 835e12,
  'NVIDIA H200': 989e12,
  'NVIDIA H200 NVL': 835e12,
}


def peak_flops(devices: Sequence[jax.Device]) -> float | None:
  """Returns the peak bfloat16 FLOP/s of all devices together.

  Returns None if PEAK_FLOPS lacks the kind of one of the devices.
  """
  peaks = [_peak(device.device_kind) for device in devices]
  return None if None in peaks else sum(peaks)


def _peak(kind):
  matches = [name for name in PEAK_FLOPS if kind.startswith(name)]
  return PEAK_FLOPS[max(matches, key=len)] if matches else None
