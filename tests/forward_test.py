"""Shapes for restoring parameters are those that training has."""

import jax

from meliad_rec.forward import Forward
from tests import tiny_run


def test_parameters_have_the_shapes_and_places_of_training():
  program = tiny_run.program(devices=8, fsdp=2, model=2)
  forward = Forward(program.model, program.mesh, program.segment)
  mine, its = forward.param_shapes, program.shapes.params
  assert jax.tree.structure(mine) == jax.tree.structure(its)
  facts = lambda a: (a.shape, a.dtype, a.sharding.spec)
  for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(its), strict=True):
    assert facts(a) == facts(b)
  specs = {str(a.sharding.spec) for a in jax.tree.leaves(mine)}
  assert len(specs) > 2
