"""Compiled functions that know of the mesh on which their arrays lie."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh


class WithinMesh:
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
