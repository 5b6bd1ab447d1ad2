"""Divides the update of the parameters among replicas (mesh axis data).

Each replica holds all parameters, but only its part of the optimizer's moments
of large arrays; partition.update_spec says which.
It receives the sum over replicas of its part of the gradients, updates this
part of the parameters, and gets the other parts from the other replicas.

Xu et al. 2020, "Automatic cross-replica sharding of weight update in
data-parallel training"; called ZeRO stage 1 by Rajbhandari et al. 2020.
"""

import functools

import jax

from meliad_rec.distributed import partition


def scatter_gradients(grads):
  """Returns gradients of which each replica holds its part of the sum.

  Without replicas, gradients are returned unchanged.

  Args:
    grads: nested dict like the parameters.
  """
  stacked = partition.stacked_paths(grads)
  return _map(lambda path, g: _scatter(path, g, path in stacked), grads)


def own_part(params):
  """Returns parameters of which each replica holds the part that it updates."""
  return _map(functools.partial(_place, partition.update_spec), params)


def gather_params(params):
  """Returns parameters that all replicas hold, from the parts of each."""
  return _map(functools.partial(_place, partition.param_spec), params)


def one_use(params, parent: str = ''):
  """Returns parameters whose gradients from one use are scattered there.

  Without it, the compiler sums whole arrays in two cases: if a model uses a
  parameter in several places, where it may add the gradient from one use to the
  sum over replicas of that from another; and if a loop over layers computes the
  gradients, which it stacks first.

  Args:
    params: nested dict of parameters, or one of them. Those whose path matches
      no rule of partition.RULES are returned unchanged.
    parent: path of `params` in the parameters of the model, if the rules need
      it.
  """

  def one(path, leaf):
    path = f'{parent}/{path}'.strip('/')
    return _one_use(path, leaf) if partition.has_rule(path) else leaf

  return _map(one, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _one_use(path, param):
  del path
  return param


_one_use.defvjp(
  lambda path, param: (param, None),
  lambda path, _, gradient: (_scatter(path, gradient),),
)


def _scatter(path, gradient, stacked=False):
  # The first sharding makes the compiler sum whole gradients, and the second
  # makes it scatter the sums. With the second alone, it would cut the matrix
  # products of the backward pass into many small ones. Stacks of layers are
  # scattered already.
  if not stacked:
    gradient = _place(partition.param_spec, path, gradient)
  return _place(partition.update_spec, path, gradient)


def _place(spec, path, leaf):
  spec = spec(jax.sharding.get_abstract_mesh(), path, leaf.shape)
  return jax.lax.with_sharding_constraint(leaf, spec)


def _map(function, tree):
  """Maps a function of path and leaf over a tree, if there are replicas."""
  if _replicas() == 1:
    return tree
  return jax.tree.map_with_path(
    lambda path, leaf: function(partition.path_string(path), leaf), tree
  )


def _replicas() -> int:
  """Returns the number of replicas; 1 if XLA does not partition over all axes.

  So it is on the mesh of a user that lacks one, and within a shard_map.
  """
  axes = partition.auto_axes(jax.sharding.get_abstract_mesh())
  return axes['data'] if axes.keys() >= {'data', 'fsdp', 'model'} else 1
