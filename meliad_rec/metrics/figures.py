"""What modules count for the metrics: means that add up, and peaks.

A module sows a figure each time it runs. Whatever runs it several times (a
scan, a stack of layers, the steps between two lines) makes one figure of all.
"""

from collections.abc import Sequence
import math
from typing import Any

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

COLLECTION = 'figures'


class Ratio(struct.PyTreeNode):
  """A mean or a share: the sum of all totals by the sum of all counts."""

  total: jax.Array
  count: jax.Array


class Peak(struct.PyTreeNode):
  """The greatest of all values."""

  value: jax.Array


Figure = Ratio | Peak


def sow(module: nn.Module, name: str, figure: Figure) -> None:
  """Counts a figure where figures are collected; elsewhere it does nothing.

  Args:
    module: a bound module.
    name: what the metrics call it; all that is sown under one name, by whatever
      modules, is one figure.
    figure: of any numbers, over all of whose axes it is taken.
  """
  module.sow(COLLECTION, name, jax.lax.stop_gradient(_scalar(figure)))


def collect(sown: Any) -> dict[str, Figure]:
  """The figures of a step by name, of float32 scalars.

  Args:
    sown: the collection as `apply` returned it; {} where nothing was sown.

  Raises:
    ValueError: a name is sown as both kinds.
  """
  found = {}
  for path, figure in jax.tree.leaves_with_path(sown, is_leaf=is_figure):
    # A name holds the tuple of its module's calls.
    found.setdefault(path[-2].key, []).append(_scalar(figure))
  return {name: _joined(name, figures) for name, figures in found.items()}


def is_figure(node: Any) -> bool:
  """Whether this is a figure: what jax.tree takes for a leaf."""
  return isinstance(node, Figure)


def over_steps(figures: Sequence[Figure]) -> float | None:
  """One number of what one name had in each step, on the host.

  Returns:
    The mean, exact over any number of steps, or the peak; None: the mean of
    nothing.
  """
  if isinstance(figures[0], Peak):
    # NumPy's, unlike Python's, hands on what is not a number.
    return float(np.max([peak.value for peak in figures]))
  count = math.fsum(float(ratio.count) for ratio in figures)
  total = math.fsum(float(ratio.total) for ratio in figures)
  return total / count if count else None


def _scalar(figure):
  if isinstance(figure, Peak):
    return Peak(jnp.max(jnp.asarray(figure.value, jnp.float32)))
  return jax.tree.map(lambda a: jnp.sum(a, dtype=jnp.float32), figure)


def _joined(name, figures):
  if len({type(figure) for figure in figures}) > 1:
    raise ValueError(
      f'The figure {name} is sown as a Ratio and as a Peak; give one of them '
      'another name.'
    )
  return _scalar(jax.tree.map(lambda *a: jnp.stack(a), *figures))
