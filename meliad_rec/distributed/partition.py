"""Sharding of every array of a run over a mesh, defined outside the models.

The mesh has the axes data (replicas), fsdp (shards of parameters) and model
(shards of heads, hidden units and vocabulary). The path of a parameter matches
exactly one of RULES. This rule names the parameter's last axes; MESH_AXES maps
the names to axes of the mesh. Earlier axes, such as that of stacked layers, are
not sharded. The optimizer's moments are sharded like their parameters, and over
data as well (`update_spec`). A batch is sharded by rows over data and fsdp. So
is the carry, which is the model's state between two segments. The carry's keys
and values are also sharded by heads (CARRY_RULES).
"""

import collections
import math
import re
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

RULES = (
  (r'embed/(embedding|output)(_\d+)?$', ('vocab', 'embed')),
  (r'embed/((output_)?maps_\d+/kernel|clusters)$', (None, 'embed')),
  (r'^embed/(kernel|bias)$', ('embed',)),
  (r'^(policy|value)/kernel$', ('embed', None)),
  (r'^(policy|value)/bias$', (None,)),
  (r'embed/output/kernel$', ('embed', 'vocab')),
  (r'embed/output/bias$', ('vocab',)),
  (r'attention/(.*/)?(query|key|value|heads)/kernel$', ('embed', 'heads')),
  (r'attention/output/((linear|z|i|f)/)?kernel$', ('heads', 'embed')),
  (r'mlp/hidden/kernel$', ('embed', 'mlp')),
  (r'mlp/hidden/bias$', ('mlp',)),
  (r'mlp/output/((linear|z|i|f)/)?kernel$', ('mlp', 'embed')),
  (r'router/kernel$', ('embed', None)),
  (r'gate/hidden/kernel$', ('embed', 'mlp')),
  (r'gate/hidden/bias$', ('mlp',)),
  (r'gate/last/kernel$', ('mlp', None)),
  (r'gate/last/bias$|mlp/output/bias$', (None,)),
  (r'output/(linear|i|f|z)/bias$|output/gate$', (None,)),
  # An LSTM is not sharded over model: each token would wait for hidden units of
  # other devices. Its recurrence is not sharded over fsdp either: XLA of jaxlib
  # 0.10.2 sums its products incorrectly on a mesh with all three axes.
  (r'input_kernel$', ('embed', None)),
  (r'recurrence$', (None, None)),
  (r'gate_bias$', (None,)),
  (r'head/hidden/kernel$', ('embed', 'mlp')),
  (r'head/hidden/bias$', ('mlp',)),
  (r'head/output/kernel$', ('mlp', None)),
  (r'head/output/bias$', (None,)),
  (r'/(ids|first)$', (None, None)),
  (r'norm/(scale|bias)$|query/scale$', (None,)),
  (r'position/table$', (None, None)),
  (r'memory/mix(_\d+)?$|span/ratio$', (None,)),
)
MESH_AXES = {
  'vocab': 'model',
  'embed': 'fsdp',
  'heads': 'model',
  'mlp': 'model',
}
BATCH_AXES = ('data', 'fsdp')
# Replicas divide the update of arrays of at least this many elements. Smaller
# ones take less time to update than to exchange.
DIVIDED = 2**16
# Names of the last axes of those leaves of the carry that have heads.
CARRY_RULES = (
  (r'(^|/)(k|v)$', ('heads', None)),
  (r'(^|/)(keys|values)$', ('heads', None, None)),
)


def make_mesh(
  data: int | None = None, fsdp: int = 1, model: int = 1, devices=None
) -> Mesh:
  """Returns a mesh of devices with the axes data, fsdp and model.

  Args:
    data: number of replicas. None means the number of devices divided by
      fsdp * model.
    fsdp: number of shards of each parameter along its embedding axis.
    model: number of shards of heads, hidden units and vocabulary.
    devices: devices to use. None uses all devices.

  Raises:
    ValueError: the size of an axis is below 1, or the product of the sizes is
      not the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  for axis, size in ('data', data), ('fsdp', fsdp), ('model', model):
    if size is not None and size < 1:
      raise ValueError(
        f'{axis} must be at least 1, got {size}. Set'
        f' partition.make_mesh.{axis}.'
      )
  if data is None:
    data = max(len(devices) // (fsdp * model), 1)
  shape = data, fsdp, model
  if np.prod(shape) != len(devices):
    raise ValueError(
      f'The mesh data {data} x fsdp {fsdp} x model {model} needs '
      f'{np.prod(shape)} devices, but there are {len(devices)}. Give --mesh '
      f'axes whose product is {len(devices)}.'
    )
  # Auto: with Explicit axes, a sharding constraint would be an assertion.
  types = (AxisType.Auto,) * 3
  # A mesh axis of 8 on chips of 4 x 4 x 4 splits a physical axis.
  placed = mesh_utils.create_device_mesh(
    shape, devices, allow_split_physical_axes=True
  )
  return Mesh(placed, ('data', 'fsdp', 'model'), axis_types=types)


def path_string(path) -> str:
  """Returns a key path of a pytree as a string such as 'cell/cells_0/...'."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def leaves_by_path(tree: Any) -> dict[str, Any]:
  """Returns {path: leaf} of a pytree; see `path_string`. None is not a leaf."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {path_string(path): leaf for path, leaf in leaves}


def has_rule(path: str) -> bool:
  """Returns whether one of RULES matches the path of a parameter."""
  return any(re.search(pattern, path) for pattern, _ in RULES)


def logical_axes(path: str) -> tuple[str | None, ...]:
  """Returns the names of the last axes of the parameter with this path.

  The name of an axis that neither fsdp nor model shards is None.

  Raises:
    ValueError: not exactly one of RULES matches the path.
  """
  found = [axes for pattern, axes in RULES if re.search(pattern, path)]
  if len(found) != 1:
    raise ValueError(
      f'Parameter {path} must match exactly one sharding rule, but matches '
      f'{len(found)}. Correct partition.RULES, or use one device.'
    )
  return found[0]


def stacked_paths(params) -> set[str]:
  """Returns the paths of parameters that a scan over layers has stacked.

  Such a scan is a stack.Repeat whose layers do not share parameters. Its field
  `cell` is the repeated layer. Every parameter of that layer has more axes than
  RULES lists; without stacking, some parameters have as many.

  Args:
    params: nested dict of parameters; paths that match no rule are left out.

  Raises:
    ValueError: the path of a parameter matches several rules.
  """
  layers = collections.defaultdict(dict)
  for path, leaf in leaves_by_path(params).items():
    layer, cell, _ = path.rpartition('/cell/')
    if cell and has_rule(path):
      layers[layer][path] = leaf.ndim > len(logical_axes(path))
  stacked = [paths for paths in layers.values() if all(paths.values())]
  return set().union(*stacked)


def param_spec(mesh: Mesh, path: str, shape: tuple[int, ...]) -> PartitionSpec:
  """Returns the PartitionSpec of the parameter with this path and shape.

  On a single device, a parameter needs no rule.

  Raises:
    ValueError: not exactly one of RULES matches the path.
  """
  if mesh.size == 1:
    return PartitionSpec()
  return PartitionSpec(*mesh_axes(mesh, logical_axes(path), shape))


def auto_axes(mesh) -> dict[str, int]:
  """Returns the sizes, by name, of the mesh axes over which XLA partitions.

  Within a shard_map, these are the axes that it does not name.
  """
  return {
    name: mesh.shape[name]
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    if kind == AxisType.Auto
  }


def update_spec(mesh: Mesh, path: str, shape: tuple[int, ...]) -> PartitionSpec:
  """Returns the PartitionSpec of a parameter's moments and of its update.

  The mesh axes fsdp and model shard the update as they shard the parameter. The
  mesh axis data shards it too, along one of the axes that RULES lists, with a
  name or None: the first that is not sharded yet and can be divided by the
  number of replicas, or else the first whose shards can be divided. If there is
  none, or if these axes have less than DIVIDED elements, all replicas compute
  the same update.

  Raises:
    ValueError: not exactly one of RULES matches the path.
  """
  spec = param_spec(mesh, path, shape)
  replicas = mesh.shape['data']
  if replicas == 1:
    return spec
  first = len(shape) - len(logical_axes(path))
  if math.prod(shape[first:]) < DIVIDED:
    return spec
  axes = range(first, len(shape))
  shards = [1 if axis is None else mesh.shape[axis] for axis in spec]
  for i in sorted(axes, key=lambda i: shards[i] > 1):  # Unsharded ones first.
    if shape[i] % (shards[i] * replicas) == 0:
      divided = (spec[i], 'data') if shards[i] > 1 else 'data'
      return PartitionSpec(*spec[:i], divided, *spec[i + 1 :])
  return spec


def mesh_axes(
  mesh: Mesh, names: tuple[str | None, ...], shape: tuple[int, ...]
) -> list[str | None]:
  """Returns, for each axis of an array, the mesh axis that shards it, or None.

  An axis whose size is not a multiple of the mesh axis's size is not sharded.

  Args:
    mesh: the mesh.
    names: names of the last axes of the array, from RULES or CARRY_RULES; None
      for an axis that is never sharded.
    shape: shape of the array.
  """
  axes = [None] * (len(shape) - len(names)) + [MESH_AXES.get(n) for n in names]
  return [
    axis if axis and size % mesh.shape[axis] == 0 else None
    for axis, size in zip(axes, shape, strict=True)
  ]


def row_shards(mesh: Mesh) -> int:
  """Returns the number of parts into which the rows of a batch are divided."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def rows_for(mesh: Mesh, documents: int, batch: int) -> int:
  """Returns the number of rows with which to read documents in parallel.

  It is the smaller of `batch` and the number of documents, rounded up to a
  multiple of `row_shards`.
  """
  shards = row_shards(mesh)
  return -(-min(batch, documents) // shards) * shards


def batch_sharding(mesh: Mesh, rows: int) -> NamedSharding:
  """Returns the sharding of a batch's rows over the mesh axes data and fsdp.

  Raises:
    ValueError: rows is not a multiple of data * fsdp.
  """
  shards = row_shards(mesh)
  if rows % shards:
    raise ValueError(
      f'A batch of {rows} rows does not divide evenly into {shards} parts, the '
      'product of the mesh axes data and fsdp. Set BATCH to a multiple of '
      f'{shards}.'
    )
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def local_rows(mesh: Mesh, rows: int) -> np.ndarray:
  """Returns the ascending indices of the rows of a batch that this host reads.

  These are the rows of the host's devices. The indices need not be consecutive:
  the devices of a host are neighbors in the network, but not always in the
  mesh. Hosts that differ only along the axis model read the same rows.

  Args:
    mesh: the mesh.
    rows: number of rows of the batch, over all hosts.

  Raises:
    ValueError: rows is not a multiple of data * fsdp.
  """
  return rows_of(mesh, rows, jax.process_index())


def rows_of(mesh: Mesh, rows: int, host: int) -> np.ndarray:
  """Returns the result of `local_rows` on the host with this process index."""
  indices = batch_sharding(mesh, rows).devices_indices_map((rows,))
  held = [
    np.arange(rows)[part]
    for device, (part,) in indices.items()
    if device.process_index == host
  ]
  return np.unique(np.concatenate(held))


def state_shardings(mesh: Mesh, state, rows: int):
  """Returns a train_step.TrainState with the NamedSharding of every leaf.

  Parameters and their moving average follow RULES. A moment of the optimizer is
  sharded like the update of its parameter, which has the same shape. The path
  of the parameter is the end of the moment's path. The carry is sharded by
  rows, and its keys and values also by heads. All other leaves are replicated.
  Every leaf has a sharding from the start, because a restored run would
  otherwise mix arrays on incompatible sets of devices.

  Args:
    mesh: the mesh.
    state: a TrainState of arrays or of jax.ShapeDtypeStruct.
    rows: number of rows of the batch, over all hosts.

  Raises:
    ValueError: rows is not a multiple of data * fsdp, or there are several
      devices, and the path of a parameter does not match exactly one of RULES.
  """
  params = {
    path: leaf.shape for path, leaf in leaves_by_path(state.params).items()
  }
  batch_sharding(mesh, rows)  # Raises if the rows do not divide.

  def sharding(path, leaf):
    name = path_string(path)
    if name.startswith('carry/') or name == 'carry':
      return NamedSharding(mesh, carry_spec(mesh, name, leaf.shape))
    spec = update_spec if name.startswith('opt_state/') else param_spec
    for param, shape in params.items():
      if name.endswith('/' + param) and leaf.shape == shape:
        return NamedSharding(mesh, spec(mesh, param, shape))
    return NamedSharding(mesh, PartitionSpec())

  return jax.tree_util.tree_map_with_path(sharding, state)


def carry_spec(mesh: Mesh, path: str, shape: tuple[int, ...]) -> PartitionSpec:
  """Returns the PartitionSpec of a carry's leaf with this path and shape."""
  found = [names for pattern, names in CARRY_RULES if re.search(pattern, path)]
  _, *others = mesh_axes(mesh, found[0] if found else (), shape)
  return PartitionSpec(BATCH_AXES, *others)
