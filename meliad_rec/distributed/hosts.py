"""What all hosts of a run must have in common; with one, nothing happens.

Compiled functions that know of the mesh on which their arrays lie.
"""

from collections.abc import Callable
import hashlib

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
import numpy as np


def any_of(flag: bool) -> bool:
  """Whether the flag is set on any host; every host must call this."""
  if jax.process_count() == 1:
    return flag
  return bool(multihost_utils.process_allgather(np.array(flag)).any())


def agree(facts: dict[str, str]) -> None:
  """Compares what each host has found; every host must call this.

  Args:
    facts: by name, the same names on all hosts.

  Raises:
    ValueError: on all hosts, where a fact is not the same on all.
  """
  if jax.process_count() == 1:
    return
  marks = [hashlib.sha256(value.encode()).digest() for value in facts.values()]
  mine = np.frombuffer(b''.join(marks), np.uint8).reshape(len(facts), -1)
  all_marks = multihost_utils.process_allgather(mine)
  differs = (all_marks != all_marks[0]).any(axis=-1)
  if not differs.any():
    return
  names = [list(facts)[i] for i in np.flatnonzero(differs.any(axis=0))]
  others = [str(host) for host in np.flatnonzero(differs.any(axis=1))]
  raise ValueError(
    f'The hosts differ in {", ".join(names)}: process {", ".join(others)} has'
    ' another than process 0; give all of them the same data, settings and'
    ' --workdir.'
  )


class MeshJit:
  """A function of jax.jit that is traced, and lowered, within a mesh.

  Arrays that lie on a mesh do not tell of it what is traced; and kernels, which
  compilers cannot cut, must be told (see kernels/per_shard.py).
  """

  def __init__(self, mesh: Mesh, jitted: Callable):
    self._mesh, self._jitted = mesh, jitted

  def __call__(self, *arguments):
    with jax.set_mesh(self._mesh):
      return self._jitted(*arguments)

  def lower(self, *arguments):
    with jax.set_mesh(self._mesh):
      return self._jitted.lower(*arguments)
