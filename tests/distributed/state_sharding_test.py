"""Where the parts of a train state lie; program_test runs steps on them."""

import functools

import jax
from jax.sharding import PartitionSpec
import optax
import pytest

from meliad_rec.distributed import partition
from meliad_rec.distributed import partition as state_sharding
from meliad_rec.metrics import losses
from meliad_rec.models.model import empty_carry
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from meliad_rec.training import optimizer
from meliad_rec.training import schedules
from meliad_rec.training.program import TrainProgram
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


def state(rule, **settings):
  """A train state on a (2, 2, 2) mesh, with an average of the parameters."""
  program = TrainProgram(
    model=Model(32, tiny.ARCHITECTURES['window_scanned'].cell(), tiny.D),
    optimizer=optimizer.chain(rule, schedules.rsqrt(10), **settings),
    objective=losses.objective,
    mesh=partition.make_mesh(2, 2, 2),
    rows=4,
    segment=tiny.T,
    ema_decay=0.9,
  )
  return program.shapes


def facts(tree):
  """Of each leaf its shape and place, in the tree's order."""
  return [(leaf.shape, leaf.sharding.spec) for leaf in jax.tree.leaves(tree)]


def moments(opt_state, params) -> list:
  """Its parts that are trees like the parameters, of the same shapes."""
  structure = jax.tree.structure(params)
  alike = lambda part: jax.tree.structure(part) == structure
  sizes = lambda tree: [leaf.shape for leaf in jax.tree.leaves(tree)]
  return [
    part
    for part in jax.tree.leaves(opt_state, is_leaf=alike)
    if alike(part) and sizes(part) == sizes(params)
  ]


@pytest.mark.parametrize(
  'rule, settings, count',
  [
    (optimizer.adamw, {}, 2),  # mu, nu.
    (optimizer.adamw, {'every': 2, 'clip_norm': 1.0}, 3),  # And sums.
    (optimizer.adafactor, {}, 2),  # Momentum; v, as nothing is 128 wide.
    (optimizer.adafactor, {'every': 2}, 3),
    (functools.partial(optimizer.adafactor, momentum=None), {}, 1),
    (optax.lion, {}, 1),
  ],
)
def test_moments_and_averages_lie_as_their_parameters(rule, settings, count):
  found = state(rule, **settings)
  wanted = facts(found.params)
  assert {'fsdp', 'model'} <= {axis for _, spec in wanted for axis in spec}
  parts = moments(found.opt_state, found.params)
  assert len(parts) == count
  for part in (*parts, found.ema):
    assert facts(part) == wanted
