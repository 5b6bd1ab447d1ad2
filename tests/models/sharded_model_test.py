"""Shapes and shardings of parameters equal those of training."""

import dataclasses
import functools

import jax
import pytest

from meliad_rec.archs import stack
from meliad_rec.archs.window import WindowLayer
from meliad_rec.distributed.partition import batch_sharding
from meliad_rec.distributed.partition import make_mesh
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.models.model import empty_carry
from meliad_rec.models.model import Model
from meliad_rec.models.sharded_model import eval_step
from meliad_rec.models.sharded_model import ShardedModel
from meliad_rec.planning import topology
from tests import tiny_run
from tests.libtpu import needs_libtpu


def test_parameters_have_the_shapes_and_places_of_training():
  program = tiny_run.program(devices=8, fsdp=2, model=2)
  forward = ShardedModel(program.model, program.mesh, program.segment)
  mine, its = forward.param_shapes, program.shapes.params
  assert jax.tree.structure(mine) == jax.tree.structure(its)
  facts = lambda a: (a.shape, a.dtype, a.sharding.spec)
  for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(its), strict=True):
    assert facts(a) == facts(b)
  specs = {str(a.sharding.spec) for a in jax.tree.leaves(mine)}
  assert len(specs) > 2


@needs_libtpu
@pytest.mark.parametrize('axes', [(4,), (1, 2, 2)])
def test_evaluation_compiles_for_many_chips_with_kernels(axes):
  """Kernels compile for several chips only under a mesh."""
  mesh = make_mesh(*axes, devices=topology.devices('v5e:2x2'))
  config = LayerConfig(
    d_model=128,
    num_heads=4,
    head_dim=64,
    mlp_dim=128,
    window=128,
    dtype='bfloat16',
  )
  cell = stack.layers(1, functools.partial(WindowLayer, config))
  forward = ShardedModel(Model(64, cell, 128, dtype='bfloat16'), mesh, 256)
  rows = 8
  program = dataclasses.replace(
    tiny_run.program(), model=forward.model, mesh=mesh, segment=256, rows=rows
  )
  place = batch_sharding(mesh, rows)
  carry = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place),
    jax.eval_shape(
      lambda p: empty_carry(forward.model, p, rows), forward.param_shapes
    ),
  )
  given = forward.param_shapes, carry, program.batch_shapes(rows)
  step = functools.partial(eval_step, forward.model)
  with jax.set_mesh(mesh):
    text = jax.jit(step).lower(*given).compile().as_text()
  assert 'window_attention_forward' in text
