"""Where the parts of a train state lie; program_test runs steps on them."""

import jax
from jax.sharding import PartitionSpec
import pytest

from meliad_rec import partition
from meliad_rec import state_sharding
from meliad_rec.model import empty_carry
from meliad_rec.model import initialize
from meliad_rec.model import Model
from tests import architectures as tiny

ROWS = partition.BATCH_AXES
H = tiny.H


def carry_specs(name, mesh, rows):
  """By path, the shape and the place of each leaf."""
  model = Model(32, tiny.ARCHITECTURES[name].cell(), tiny.D)

  def carry(rng):
    params = initialize(model, rng, rows, tiny.T)
    return empty_carry(model, params, rows)

  shapes = jax.eval_shape(carry, jax.random.key(0))
  return {
    partition.path_string(path): (
      leaf.shape,
      state_sharding.carry_spec(mesh, partition.path_string(path), leaf.shape),
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
  }


@pytest.mark.parametrize(
  'name',
  ['window', 'window_scanned', 'memorizing', 'recurrent_fixed_skip', 'lstm'],
)
def test_keys_and_values_are_cut_by_heads_and_all_by_rows(name):
  mesh = partition.make_mesh(2, 2, H, devices=jax.devices()[: 4 * H])
  found = carry_specs(name, mesh, rows=8)
  cut = 0
  for shape, spec in found.values():
    assert spec[0] == ROWS
    axes = [i for i, axis in enumerate(spec) if axis == 'model']
    assert all(shape[axis] == H for axis in axes)
    cut += len(axes)
  assert cut == sum(
    path.rpartition('/')[2] in ('k', 'v', 'keys', 'values') for path in found
  )
  assert cut or name == 'lstm'


def test_heads_that_do_not_divide_stay_whole():
  mesh = partition.make_mesh(1, 1, 8)
  shape = 4, 16, 3, 10
  spec = state_sharding.carry_spec(mesh, '0/k', shape)
  assert spec == PartitionSpec(ROWS, None, None, None)
