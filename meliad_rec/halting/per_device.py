"""Early exit of each device by itself, under a mesh.

Jit over a mesh asks in each step whether any row goes on, on whatever device,
and all devices take as many steps as the slowest. Under shard_map over the axes
that cut the rows, each takes those that its own rows need. Nothing in a step
may then be added up over these axes, since another device may have left the
loop: parameters come in whole along them. Other axes, such as 'model', stay
with the compiler; devices along those hold the same rows, and so agree.
"""

from collections.abc import Callable
import math

import jax
from jax.sharding import PartitionSpec

from meliad_rec.partition import BATCH_AXES


def per_device(loop: Callable) -> Callable:
  """A loop of loop.py or compaction.py, run by each device for its rows.

  Where there is no mesh, or none that cuts the rows evenly, the loop as it is.
  """

  def run(steps, shared, rows, state, most):
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(a for a in BATCH_AXES if dict(mesh.shape).get(a, 1) > 1)
    count = math.prod(mesh.shape[axis] for axis in axes)
    if not axes or len(jax.tree.leaves(state)[0]) % count:
      return loop(steps, shared, rows, state, most)
    own = PartitionSpec(axes)
    return jax.shard_map(
      lambda shared, rows, state: loop(steps, shared, rows, state, most),
      in_specs=(PartitionSpec(), own, own),
      out_specs=own,
      axis_names=set(axes),
      check_vma=False,
    )(shared, rows, state)

  return run
