"""A kernel, or a search, on each device's own rows and heads.

Compilers cut what they know themselves over a mesh; a kernel must be told. Nor
do they cut a search for the greatest: they gather its rows.
"""

from collections.abc import Callable
from collections.abc import Sequence

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec

from meliad_rec.partition import BATCH_AXES
from meliad_rec.partition import MESH_AXES

_HEADS = {'tokens': 2, 'sums': 1}  # The axis of heads.


def per_shard(
  call: Callable, kinds: Sequence[str], arguments, results: Sequence[str]
) -> Callable:
  """`call` for the rows and heads of each device, where there is a mesh.

  Args:
    call: takes the arguments, each an array or None.
    kinds: of each argument: 'tokens' [B, T, H, K], 'rows' [B, S], 'sums' [B, H,
      ...], or 'heads' [H, ...]; there are tokens or sums.
    arguments: the whole ones.
    results: kinds of what it returns; 'heads' are added up over rows.
  """
  mesh = jax.sharding.get_abstract_mesh()
  free = {
    name: mesh.shape[name]
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    if kind == AxisType.Auto
  }
  if not free:
    return call
  # An axis of one place is named too: a kernel is told of all or of none.
  rows, heads = [], MESH_AXES['heads']
  cut = [
    (a, _HEADS[kind])
    for a, kind in zip(arguments, kinds, strict=True)
    if kind in _HEADS
  ]
  left = len(cut[0][0])
  for axis in BATCH_AXES:
    if axis in free and left % free[axis] == 0:
      rows.append(axis)
      left //= free[axis]
  whole = any(a.shape[axis] % free.get(heads, 1) for a, axis in cut)
  heads = None if whole or heads not in free else heads
  rows = tuple(rows) or None
  specs = {
    'tokens': PartitionSpec(rows, None, heads),
    'rows': PartitionSpec(rows),
    'sums': PartitionSpec(rows, heads),
    'heads': PartitionSpec(heads),
  }

  def local(*arguments):
    found = call(*arguments)
    if not rows:
      return found
    return tuple(
      jax.tree.map(lambda leaf: jax.lax.psum(leaf, rows), a)
      if kind == 'heads'
      else a
      for a, kind in zip(found, results, strict=True)
    )

  return jax.shard_map(
    local,
    mesh=mesh,
    axis_names=set(free),
    in_specs=tuple(specs[kind] for kind in kinds),
    out_specs=tuple(specs[kind] for kind in results),
    check_vma=False,
  )
