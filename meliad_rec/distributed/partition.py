"""Where every array lies on a mesh: one table, outside the models.

A parameter's path matches exactly one rule, which names its last axes; axes in
front of those (stacked layers, sources) are whole everywhere. Logical axes map
to the mesh axes data, fsdp and model.

Where all of a train state lies on a mesh.

Parameters by partition.RULES, the carry by rows and its keys and values by
heads too, moments of the optimiser as their parameters.
"""

import re

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
  # An LSTM is whole over model, or each token would wait for hidden units of
  # other devices. Its recurrence is whole over fsdp too: XLA of jaxlib 0.10.2
  # adds up h u wrongly where the mesh cuts three ways.
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


def make_mesh(
  data: int | None = None, fsdp: int = 1, model: int = 1, devices=None
) -> Mesh:
  """A mesh of all devices.

  Args:
    data: replicas; None: what the other axes leave.
    fsdp: places each parameter is cut into along its embedding axis.
    model: places heads, hidden units and vocabulary are cut into.
    devices: those to use; None: all of them.

  Raises:
    ValueError: an axis below 1, or the axes do not use up the devices.
  """
  devices = jax.devices() if devices is None else devices
  for axis, size in ('data', data), ('fsdp', fsdp), ('model', model):
    if size is not None and size < 1:
      raise ValueError(
        f'{axis} is {size}; it needs 1 or more. Set partition.make_mesh.{axis}.'
      )
  if data is None:
    data = max(len(devices) // (fsdp * model), 1)
  shape = data, fsdp, model
  if np.prod(shape) != len(devices):
    raise ValueError(
      f'The mesh data {data} x fsdp {fsdp} x model {model} needs '
      f'{np.prod(shape)} devices; there are {len(devices)}. Give --mesh axes '
      'whose product that is.'
    )
  # Auto: with explicit axes a sharding constraint would be an assertion.
  types = (AxisType.Auto,) * 3
  # Split, as chips of 4 x 4 x 4 have no axes that together are 8 long.
  placed = mesh_utils.create_device_mesh(
    shape, devices, allow_split_physical_axes=True
  )
  return Mesh(placed, ('data', 'fsdp', 'model'), axis_types=types)


def path_string(path) -> str:
  """A key path as 'cell/cells_0/...'."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def logical_axes(path: str) -> tuple[str | None, ...]:
  """The names of a parameter's last axes.

  Raises:
    ValueError: no rule matches, or several do.
  """
  found = [axes for pattern, axes in RULES if re.search(pattern, path)]
  if len(found) != 1:
    raise ValueError(
      f'Parameter {path} matches {len(found)} sharding rules; it needs exactly '
      'one. Add it to partition.RULES.'
    )
  return found[0]


def param_spec(mesh: Mesh, path: str, shape: tuple[int, ...]) -> PartitionSpec:
  """How a parameter is cut; an axis that does not divide evenly stays whole."""
  return PartitionSpec(*mesh_axes(mesh, logical_axes(path), shape))


def mesh_axes(
  mesh: Mesh, names: tuple[str | None, ...], shape: tuple[int, ...]
) -> list[str | None]:
  """For each axis of an array, the last of which have names, one of the mesh.

  None: the axis stays whole, as does one that does not divide evenly.
  """
  axes = [None] * (len(shape) - len(names)) + [MESH_AXES.get(n) for n in names]
  return [
    axis if axis and size % mesh.shape[axis] == 0 else None
    for axis, size in zip(axes, shape, strict=True)
  ]


def batch_sharding(mesh: Mesh, rows: int) -> NamedSharding:
  """Rows over data and fsdp.

  Raises:
    ValueError: the rows do not divide evenly.
  """
  places = np.prod([mesh.shape[axis] for axis in BATCH_AXES])
  if rows % places:
    raise ValueError(
      f'A batch of {rows} rows does not divide over {places} devices; set '
      f'BATCH to a multiple of {places}.'
    )
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def local_rows(mesh: Mesh, rows: int) -> np.ndarray:
  """The rows of a batch that this host's devices hold, in order, to read them.

  They may lie apart: the devices of a host are neighbours in space, and those
  of a mesh need not be. Hosts that a model axis spans hold, and read, the same.

  Raises:
    ValueError: the rows do not divide evenly.
  """
  return rows_of(mesh, rows, jax.process_index())


def rows_of(mesh: Mesh, rows: int, host: int) -> np.ndarray:
  """As local_rows, of any host."""
  places = batch_sharding(mesh, rows).devices_indices_map((rows,))
  held = [
    np.arange(rows)[part]
    for device, (part,) in places.items()
    if device.process_index == host
  ]
  return np.unique(np.concatenate(held))


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
    path_string(path): (
      leaf.shape,
      param_spec(mesh, path_string(path), leaf.shape),
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
  }
  batch_sharding(mesh, rows)  # Refuses rows that do not divide.

  def place(path, leaf):
    name = path_string(path)
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
  _, *others = mesh_axes(mesh, found[0] if found else (), shape)
  return PartitionSpec(BATCH_AXES, *others)
