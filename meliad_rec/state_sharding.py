"""Where all of a train state lies on a mesh.

Parameters by partition.RULES, the carry by rows and its keys and values by
heads too, moments of the optimiser as their parameters.
"""

import re

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from meliad_rec import partition

# The last axes of what a carry holds of each head; all else is cut by rows.
CARRY_RULES = (
  (r'(^|/)(k|v)$', ('heads', None)),
  (r'(^|/)(keys|values)$', ('heads', None, None)),
)


def state_shardings(mesh: Mesh, state, rows: int):
  """Like a train state, a NamedSharding for every leaf.

  Moments lie as the parameter whose path and shape they share, what is not
  named whole: every leaf has a place from the start, or a restored run would
  mix incompatible ones.
  """
  params = {
    partition.path_string(path): (
      leaf.shape,
      partition.param_spec(mesh, partition.path_string(path), leaf.shape),
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
  }
  partition.batch_sharding(mesh, rows)  # Refuses rows that do not divide.

  def place(path, leaf):
    name = partition.path_string(path)
    if name.startswith('carry/') or name == 'carry':
      return NamedSharding(mesh, carry_spec(mesh, name, leaf.shape))
    for param, (shape, spec) in params.items():
      if name.endswith('/' + param) and leaf.shape == shape:
        return NamedSharding(mesh, spec)
    return NamedSharding(mesh, PartitionSpec())

  return jax.tree_util.tree_map_with_path(place, state)


def carry_spec(mesh: Mesh, path: str, shape: tuple[int, ...]) -> PartitionSpec:
  """How a leaf of the carry is cut: by rows, keys and values by heads too."""
  found = [names for pattern, names in CARRY_RULES if re.search(pattern, path)]
  _, *others = partition.mesh_axes(mesh, found[0] if found else (), shape)
  return PartitionSpec(partition.BATCH_AXES, *others)
