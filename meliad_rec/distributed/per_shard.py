"""A kernel, a search, or attention on each device's own rows and heads.

Compilers cut what they know themselves over a mesh; a kernel must be told. Nor
do they cut a search for the greatest: they gather its rows. And attention they
may cut by its queries, and then exchange them in each layer.
"""

from collections.abc import Callable
from collections.abc import Sequence
import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec

from meliad_rec.distributed.partition import BATCH_AXES
from meliad_rec.distributed.partition import MESH_AXES

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
  free = _free(mesh)
  if not free:
    return call
  # An axis of one place is named too: a kernel is told of all or of none.
  heads = MESH_AXES['heads']
  cut = [
    (a, _HEADS[kind])
    for a, kind in zip(arguments, kinds, strict=True)
    if kind in _HEADS
  ]
  rows = _rows(free, len(cut[0][0]))
  whole = any(a.shape[axis] % free.get(heads, 1) for a, axis in cut)
  heads = None if whole or heads not in free else heads
  specs = {
    'tokens': PartitionSpec(rows or None, None, heads),
    'rows': PartitionSpec(rows or None),
    'sums': PartitionSpec(rows or None, heads),
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


def cut_alike(a_BSHK, heads: int):
  """Heads of keys, repeated so that they divide as those of queries do.

  Fewer key heads than there are places along the axis of heads would leave all
  heads of queries to each device.
  """
  mesh = jax.sharding.get_abstract_mesh()
  places = _free(mesh).get(MESH_AXES['heads'], 1)
  own = a_BSHK.shape[2]
  if own % places == 0 or heads % places:
    return a_BSHK
  return jnp.repeat(a_BSHK, math.lcm(own, places) // own, 2)


def heads_of_device(heads: int, num_kv_heads: int) -> tuple[int, int]:
  """Of so many heads those of one device, of queries and of keys."""
  mesh = jax.sharding.get_abstract_mesh()
  places = _free(mesh).get(MESH_AXES['heads'], 1)
  if heads % places:
    return heads, num_kv_heads
  return heads // places, math.lcm(num_kv_heads, places) // places


def per_row(call: Callable, of_rows, shared):
  """`call(of_rows, shared)`, for the rows of each device where there is a mesh.

  Args:
    call: what it gives is of rows too.
    of_rows: a pytree of arrays [B, ...].
    shared: a pytree of arrays that all rows read; along the axes of rows they
      are whole.
  """
  mesh = jax.sharding.get_abstract_mesh()
  rows = _rows(_free(mesh), len(jax.tree.leaves(of_rows)[0]))
  # XLA fails on loops that are told of axes of one place alone.
  rows = tuple(axis for axis in rows if mesh.shape[axis] > 1)
  if not rows:
    return call(of_rows, shared)
  cut = PartitionSpec(rows)
  return jax.shard_map(
    call,
    mesh=mesh,
    axis_names=set(rows),
    in_specs=(cut, PartitionSpec()),
    out_specs=cut,
    check_vma=False,
  )(of_rows, shared)


def _free(mesh) -> dict[str, int]:
  """The axes that are the compiler's to cut over, and their places."""
  return {
    name: mesh.shape[name]
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    if kind == AxisType.Auto
  }


def _rows(free: dict[str, int], left: int) -> tuple[str, ...]:
  """Of these axes, those that so many rows are cut over."""
  rows = []
  for axis in BATCH_AXES:
    if axis in free and left % free[axis] == 0:
      rows.append(axis)
      left //= free[axis]
  return tuple(rows)
