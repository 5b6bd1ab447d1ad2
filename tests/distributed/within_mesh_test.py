"""What is traced knows the mesh, which arrays alone do not tell."""

import jax
import jax.numpy as jnp

from meliad_rec.distributed.hosts import MeshJit
from meliad_rec.distributed.partition import make_mesh


def test_what_is_traced_and_lowered_knows_the_mesh():
  mesh, seen = make_mesh(2, 2, 2), []

  def double(x):
    seen.append(dict(jax.sharding.get_abstract_mesh().shape))
    return 2 * x

  within = MeshJit(mesh, jax.jit(double))
  assert within(jnp.ones(3)).tolist() == [2, 2, 2]
  within.lower(jnp.ones(4))
  assert seen == [dict(mesh.shape)] * 2
  jax.jit(double)(jnp.ones(5))
  assert seen[-1] == {}
