"""Parameters that are cut over fsdp, whole where they are read.

Rows are cut over fsdp too. Left to itself, the compiler may gather a layer's
activations of all rows in place of its parameters.
"""

import functools
import re

import jax
from jax.sharding import PartitionSpec

from meliad_rec.distributed.partition import logical_axes
from meliad_rec.distributed.partition import param_spec
from meliad_rec.distributed.partition import path_string
from meliad_rec.distributed.partition import RULES


def all_gather_params(params, stacked: bool = True):
  """Parameters whole along fsdp: of a model, or of a loop, which reads them
  many times.

  As they are where there is no mesh.

  Args:
    params: by their paths, or the ends of these.
    stacked: whether those of layers that a scan runs through are gathered too,
      all at once. If not, the scan gathers one layer's at a time. All others
      stay whole from the forward to the backward pass.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if dict(mesh.shape).get('fsdp', 1) == 1:
    return params

  def whole(path, leaf):
    name = path_string(path)
    if not any(re.search(pattern, name) for pattern, _ in RULES):
      return leaf  # Of a module that others have too, without its whole name.
    if not stacked and leaf.ndim > len(logical_axes(name)):
      return leaf
    return _whole(param_spec(mesh, name, leaf.shape), leaf)

  return jax.tree_util.tree_map_with_path(whole, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whole(spec, leaf):
  axes = (None if axis == 'fsdp' else axis for axis in spec)
  return jax.lax.with_sharding_constraint(leaf, PartitionSpec(*axes))


def _backward(spec, _, gradient):
  # Cut as the parameter is, so that each device adds up its part alone.
  return (jax.lax.with_sharding_constraint(gradient, spec),)


_whole.defvjp(lambda spec, leaf: (_whole(spec, leaf), None), _backward)
