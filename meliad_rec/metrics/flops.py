"""FLOPs of a traced function, counted on its matrix products."""

from collections.abc import Callable
import math

import jax
from jax.extend import core


def forward_flops(function: Callable, *arguments) -> int:
  """Floating-point operations of all matrix products of one call.

  A multiplication and an addition are two operations; what a scan repeats is
  counted as often; of the branches of a condition, the dearest. The body of a
  `while` counts once, as no trace tells how often it runs. Arguments may be
  shapes alone.
  """
  return count(jax.make_jaxpr(function)(*arguments).jaxpr, turns=1)


def count(jaxpr: core.Jaxpr, turns: float) -> float:
  """`forward_flops` of a trace, whose loops run `turns` times."""
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
        total += turns * sum(inner)
      case 'cond':
        total += max(inner)
      case _:
        total += sum(inner)
  return total


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
