"""Gathers parameters before use, because the mesh axis fsdp shards them.

Rows of a batch are sharded over fsdp too. Without an explicit gather, the
compiler may gather the activations of all rows instead of the parameters.
"""

import functools

import jax
from jax.sharding import PartitionSpec

from meliad_rec.distributed.partition import has_rule
from meliad_rec.distributed.partition import param_spec
from meliad_rec.distributed.partition import path_string
from meliad_rec.distributed.partition import stacked_paths


def all_gather_params(params, stacked: bool = True):
  """Returns parameters gathered over the mesh axis fsdp.

  Call this before applying a model, and before a loop that reads the same
  parameters many times. Without a mesh, parameters are returned unchanged.

  Args:
    params: nested dict of parameters; leaves whose path matches no rule of
      partition.RULES are returned unchanged.
    stacked: whether to gather the stacked parameters of a scan over layers, all
      layers at once. If False, they stay sharded, and the scan gathers one
      layer at a time. Other parameters are always gathered, and stay gathered
      until the backward pass has used them.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if dict(mesh.shape).get('fsdp', 1) == 1:
    return params

  kept = set() if stacked else stacked_paths(params)

  def gather(path, leaf):
    name = path_string(path)
    # A shared module's parameter, without its full path, has no rule.
    if name in kept or not has_rule(name):
      return leaf
    return _gather(param_spec(mesh, name, leaf.shape), leaf)

  return jax.tree_util.tree_map_with_path(gather, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(spec, leaf):
  axes = (None if axis == 'fsdp' else axis for axis in spec)
  return jax.lax.with_sharding_constraint(leaf, PartitionSpec(*axes))


def _backward(spec, _, gradient):
  # Sharded like the parameter, so that each device sums only its own part.
  return (jax.lax.with_sharding_constraint(gradient, spec),)


_gather.defvjp(lambda spec, leaf: (_gather(spec, leaf), None), _backward)
