"""Arranges the pictures that a block sowed by layers, and sorts names."""

from collections.abc import Sequence
import re

import jax
import jax.numpy as jnp

from meliad_rec.archs.stack import Repeat
from meliad_rec.archs.stack import Stack
from meliad_rec.archs.universal import Universal
from meliad_rec.metrics import pictures
from meliad_rec.models.cell import Cell


def by_layer(cell: Cell, sown, names: Sequence[str], only: int | None):
  """Returns pictures {name: {(layer, index): array}} without the axis of rows.

  Args:
    cell: the cell of the model.
    sown: the pictures that one block sowed in one row.
    names: names of the pictures.
    only: index of the only layer to return; None means all.
  """
  found: dict[str, dict] = {name: {} for name in names}
  for path, a in jax.tree.leaves_with_path(sown):
    name = path[-2].key
    if name not in found or path[0].key != 'cell':  # Not of an encoder.
      continue
    layer, stride, in_depth = _place(cell, [part.key for part in path[:-2]])
    row = a.ndim - len(pictures.AXES[name]) - 1
    a = jnp.squeeze(a, row)
    layers = [(layer, a)]
    if row and not in_depth:  # Stacked by a Repeat.
      layers = [(layer + i * stride, part) for i, part in enumerate(a)]
    for layer, a in layers:
      if only in (None, layer):
        index = sum(1 for place in found[name] if place[0] == layer)
        found[name][layer, index] = a
  return {name: layers for name, layers in found.items() if layers}


def with_numbers(name: str) -> list[str | int]:
  """Returns a key for sorting by which 'layer_2' is before 'layer_10'."""
  return [int(s) if s.isdecimal() else s for s in re.split(r'(\d+)', name)]


def _place(cell, path: list[str]) -> tuple[int, int, bool]:
  """Returns where a module is in the model.

  Args:
    cell: the cell of the model.
    path: path of the module in the model, from the cell on.

  Returns:
    The index of its layer, or -1 if layers are not numbered; the number of
    layers of a repeat, if it is in a Repeat; and whether it is repeated in
    depth.
  """
  module, layer, stride, in_depth = cell, -1, 1, False
  for part in path[1:]:
    match = re.fullmatch(r'(?:cells|layers|update)_(\d+)', part)
    if match:
      stacked = isinstance(module, Stack)
      number = int(match[1])
      layer = max(layer, 0) + (module.firsts[number] if stacked else number)
      module = module.cells[number] if stacked else None
    elif part == 'cell' and isinstance(module, Repeat):
      module, layer = module.cell, max(layer, 0)
      stride = len(module.cells) if isinstance(module, Stack) else 1
    else:
      module = getattr(module, part, None)
      in_depth = in_depth or isinstance(module, Universal)
  return layer, stride, in_depth
