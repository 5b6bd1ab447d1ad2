"""Runs kernels, top-k search or attention on each device's own rows and heads.

XLA partitions its own operations over a mesh, but not a Pallas kernel. For a
top-k search, XLA gathers the rows of all devices. XLA may partition attention
over queries, which costs an exchange between devices in each layer.
"""

from collections.abc import Callable
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meliad_rec.distributed.partition import auto_axes
from meliad_rec.distributed.partition import BATCH_AXES
from meliad_rec.distributed.partition import MESH_AXES

_HEAD_AXES = {'BTHK': 2, 'BH': 1}


def per_shard(call: Callable, kinds, arguments, results) -> Callable:
  """Wraps `call` so that each device runs it on its own rows and heads.

  Rows or heads that do not divide evenly over the mesh are not divided. Without
  a mesh, `call` itself is returned. The kind of an array names its first axes:
  'BTHK', 'BS', 'BH' or 'H'. Further axes are not divided. An array may also be
  None.

  Args:
    call: a function of arrays.
    kinds: the kind of each argument of `call`, or a pytree of kinds; at least
      one is 'BTHK' or 'BH'.
    arguments: arguments of `call`, with all rows and heads. Only their shapes
      are read.
    results: pytree of the kinds of the results of `call`. Results of the kind
      'H' are summed over the devices that have different rows.
  """
  mesh = jax.sharding.get_abstract_mesh()
  axes = auto_axes(mesh)
  if not axes:
    return call
  # Axes of size 1 are named too: a kernel must know all axes or none.
  heads = MESH_AXES['heads']
  leaf_kinds, tree = jax.tree.flatten(tuple(kinds))
  split = [
    (a, _HEAD_AXES[kind])
    for a, kind in zip(
      tree.flatten_up_to(tuple(arguments)), leaf_kinds, strict=True
    )
    if kind in _HEAD_AXES
  ]
  rows = _row_axes(axes, len(split[0][0]))
  indivisible = any(a.shape[axis] % axes.get(heads, 1) for a, axis in split)
  heads = None if indivisible or heads not in axes else heads
  specs = {
    'BTHK': PartitionSpec(rows or None, None, heads),
    'BS': PartitionSpec(rows or None),
    'BH': PartitionSpec(rows or None, heads),
    'H': PartitionSpec(heads),
  }

  def total(kind, output):
    if kind != 'H' or not rows:
      return output
    return jax.tree.map(lambda a: jax.lax.psum(a, rows), output)

  return jax.shard_map(
    lambda *arguments: jax.tree.map(total, results, call(*arguments)),
    mesh=mesh,
    axis_names=set(axes),
    in_specs=jax.tree.map(specs.get, tuple(kinds)),
    out_specs=jax.tree.map(specs.get, results),
    check_vma=False,
  )


def split_kv_heads(a_BSHK, num_heads: int):
  """Repeats heads of keys or values so that they divide evenly over the mesh.

  Otherwise, attention would run with all heads on each device. Nothing is
  repeated if the heads already divide evenly over the mesh axis model, or if
  the query heads do not.

  Args:
    a_BSHK: keys or values.
    num_heads: number of query heads.

  Returns:
    Keys or values [B, S, H, K]. The copies of a head are neighbors.
  """
  repeats = _split_heads(num_heads, a_BSHK.shape[2]) // a_BSHK.shape[2]
  return a_BSHK if repeats == 1 else jnp.repeat(a_BSHK, repeats, 2)


def heads_of_device(num_heads: int, num_kv_heads: int) -> tuple[int, int]:
  """Returns how many query heads and how many key heads each device has."""
  size = _heads_axis_size()
  if num_heads % size:
    return num_heads, num_kv_heads
  return num_heads // size, _split_heads(num_heads, num_kv_heads) // size


def _split_heads(num_heads: int, num_kv_heads: int) -> int:
  """Returns the number of key heads that split_kv_heads makes."""
  size = _heads_axis_size()
  return num_kv_heads if num_heads % size else math.lcm(num_kv_heads, size)


def _heads_axis_size() -> int:
  axes = auto_axes(jax.sharding.get_abstract_mesh())
  return axes.get(MESH_AXES['heads'], 1)


def per_row(call: Callable, batch, shared):
  """Returns call(batch, shared), for which each device computes its own rows.

  Args:
    call: a function whose results are arrays [B, ...].
    batch: a pytree of arrays [B, ...].
    shared: a pytree of arrays that all rows read; they are not sharded over
      the mesh axes data and fsdp.
  """
  mesh = jax.sharding.get_abstract_mesh()
  rows = _row_axes(auto_axes(mesh), len(jax.tree.leaves(batch)[0]))
  # XLA fails on loops under a shard_map over axes of size 1 only.
  rows = tuple(axis for axis in rows if mesh.shape[axis] > 1)
  if not rows:
    return call(batch, shared)
  return jax.shard_map(
    call,
    mesh=mesh,
    axis_names=set(rows),
    in_specs=(PartitionSpec(rows), PartitionSpec()),
    out_specs=PartitionSpec(rows),
    check_vma=False,
  )(batch, shared)


def _row_axes(axes: dict[str, int], rows: int) -> tuple[str, ...]:
  """Returns the BATCH_AXES that together divide this many rows evenly."""
  found = []
  for axis in BATCH_AXES:
    if axis in axes and rows % axes[axis] == 0:
      found.append(axis)
      rows //= axes[axis]
  return tuple(found)
