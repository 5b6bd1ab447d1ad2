"""One rule per parameter; sharded equals unsharded (law 9); train states."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax
import pytest

from meliad_rec.distributed import partition
from meliad_rec.distributed.fsdp import all_gather_params
from meliad_rec.metrics import losses
from meliad_rec.models.model import empty_carry
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from meliad_rec.planning import topology
from meliad_rec.training import optimizer
from meliad_rec.training import schedules
from meliad_rec.training.program import TrainProgram
from tests import architectures as tiny
from tests.libtpu import needs_libtpu

B, T, V = 8, tiny.T, 32  # V is even, so that the embedding is sharded too.
MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8)]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
  """Sizes that divide over 8 devices, unlike those of other tests."""
  widen(monkeypatch, num_heads=tiny.H, head_dim=20)


def widen(monkeypatch, num_heads, head_dim):
  """Gives all architectures these heads and widths 40 and 56."""
  config = tiny.config(
    d_model=40, num_heads=num_heads, head_dim=head_dim, mlp_dim=56
  )
  sizes = {'D': 40, 'H': num_heads, 'K': head_dim, 'F': 56, 'CONFIG': config}
  for name, size in sizes.items():
    monkeypatch.setattr(tiny, name, size)


def model(name):
  return Model(V, tiny.ARCHITECTURES[name].cell(), tiny.D)


def shapes(name):
  return jax.eval_shape(
    lambda rng: initialize(model(name), rng, B, T), jax.random.key(0)
  )


@pytest.mark.parametrize('name', tiny.each())
def test_every_parameter_matches_exactly_one_rule(name):
  """Law 9, first half; and all large parameters are sharded."""
  mesh = partition.make_mesh(2, 2, 2)
  for path, leaf in jax.tree_util.tree_leaves_with_path(shapes(name)):
    name = partition.path_string(path)
    axes = partition.logical_axes(name)
    assert len(axes) <= leaf.ndim, name
    spec = partition.param_spec(mesh, name, leaf.shape)
    narrow = 1 in leaf.shape or 'router' in name or 'input_kernel' in name
    if name.endswith(('kernel', 'embedding')) and not narrow:
      assert set(spec) >= {'model', 'fsdp'}, name


def test_a_parameter_without_a_rule_is_named():
  with pytest.raises(ValueError, match='cell/new/thing matches 0'):
    partition.logical_axes('cell/new/thing')


def test_an_axis_that_does_not_divide_is_not_sharded():
  mesh = partition.make_mesh(2, 2, 2)
  spec = partition.param_spec(mesh, 'embed/embedding', (31, 20))
  assert spec == PartitionSpec(None, 'fsdp')


def test_stacked_layers_are_not_sharded_by_layer():
  mesh = partition.make_mesh(2, 2, 2)
  spec = partition.param_spec(mesh, 'cell/mlp/hidden/kernel', (3, 20, 28))
  assert spec == PartitionSpec(None, 'fsdp', 'model')


def places(params, mesh):
  """Returns a sharding for each parameter."""

  def place(path, leaf):
    spec = partition.param_spec(mesh, partition.path_string(path), leaf.shape)
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(place, params)


def unstacked(params):
  """Gathers like a training step."""
  return all_gather_params(params, stacked=False)


def loss_of(made, all_gather_params=unstacked):
  """Returns (params, carry, tokens_BT) -> (loss of a batch, new carry)."""

  def loss(params, carry, tokens_BT):
    start_B = jnp.arange(B) % 3 == 0
    mask_BT = jnp.arange(T) < T - jnp.arange(B)[:, None]
    after, logits_BTV = made.apply(
      {'params': all_gather_params(params)}, carry, tokens_BT, start_B, mask_BT
    )
    nats_BT = losses.cross_entropy(logits_BTV, jnp.roll(tokens_BT, -1, 1))
    return losses.masked_mean(nats_BT, mask_BT), after

  return loss


def gradients(name, mesh):
  """Returns the loss of a batch and its gradients, computed over a mesh."""
  made = model(name)
  loss = lambda *arguments: loss_of(made)(*arguments)[0]
  params = jax.jit(lambda rng: initialize(made, rng, B, T))(jax.random.key(0))
  carry = jax.tree.map(jnp.ones_like, empty_carry(made, params, B))
  tokens_BT = jax.random.randint(jax.random.key(1), (B, T), 1, V)
  rows = partition.batch_sharding(mesh, B)
  shardings = places(params, mesh), rows, rows
  with jax.set_mesh(mesh):
    step = jax.jit(jax.value_and_grad(loss), in_shardings=shardings)
    return step(params, carry, tokens_BT)


def share_cut(name, mesh) -> float:
  """Returns the share of all numbers that are in sharded parameters."""
  size, cut = 0, 0
  for path, leaf in jax.tree_util.tree_leaves_with_path(shapes(name)):
    spec = partition.param_spec(mesh, partition.path_string(path), leaf.shape)
    size += leaf.size
    cut += leaf.size * any(axis and mesh.shape[axis] > 1 for axis in spec)
  return cut / size


def assert_sharded_equals_unsharded(name, shape):
  mesh = partition.make_mesh(*shape)
  # An LSTM is not sharded over model.
  alike = shape == (8, 1, 1) or (name, shape) == ('lstm', (1, 1, 8))
  assert share_cut(name, mesh) > 0.5 or alike
  one = partition.make_mesh(1, devices=jax.devices()[:1])
  loss, grads = gradients(name, one)
  cut_loss, cut_grads = gradients(name, mesh)
  np.testing.assert_allclose(cut_loss, loss, rtol=1e-5)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-3),
    jax.device_get(cut_grads),
    jax.device_get(grads),
  )


def test_sharded_equals_unsharded_for_one_architecture():
  assert_sharded_equals_unsharded('recurrent_fixed_single', (2, 2, 2))


@pytest.mark.slow
@pytest.mark.parametrize('shape', MESHES)
@pytest.mark.parametrize('name', tiny.ARCHITECTURES)
def test_sharded_equals_unsharded(name, shape):
  """Law 9, second half: pytest -m slow tests/distributed/partition_test.py"""
  assert_sharded_equals_unsharded(name, shape)


def test_the_mesh_must_match_the_devices():
  with pytest.raises(ValueError, match='needs 6 devices; there are 8'):
    partition.make_mesh(2, 3, 1)
  with pytest.raises(ValueError, match='needs 16 devices; there are 8'):
    partition.make_mesh(fsdp=16)
  for axis, size in ('fsdp', 0), ('model', -8), ('data', 0):
    with pytest.raises(ValueError, match=f'{axis} .* got {size}'):
      partition.make_mesh(**{axis: size})
  assert partition.make_mesh(model=2).shape == {
    'data': 4,
    'fsdp': 1,
    'model': 2,
  }


def test_rows_must_divide():
  mesh = partition.make_mesh(4, 2, 1)
  with pytest.raises(ValueError, match='12 rows does not divide evenly over 8'):
    partition.batch_sharding(mesh, 12)


def test_one_host_reads_all_rows():
  mesh = partition.make_mesh(2, 2, 2)
  assert partition.local_rows(mesh, 12).tolist() == list(range(12))


@needs_libtpu
@pytest.mark.parametrize(
  'name, axes, one, apart',
  [
    ('v5e:4x4', (16,), 4, True),
    ('v5e:16x16', (256,), 4, True),
    ('v5e:16x16', (64, 1, 4), 2, False),
    ('v5e:16x16', (16, 16), 4, True),
    ('v5p:4x4x4', (1, 64), 4, True),
    ('v5p:2x2x2', (8,), 4, True),
  ],
)
def test_hosts_of_a_slice_share_its_rows(name, axes, one, apart):
  """Each reads as many rows; hosts along a model axis read the same."""
  devices = topology.devices(name)
  mesh = partition.make_mesh(*axes, devices=devices)
  rows = mesh.shape['data'] * mesh.shape['fsdp']
  held = [
    partition.rows_of(mesh, rows, host)
    for host in {device.process_index for device in devices}
  ]
  assert {len(rows_N) for rows_N in held} == {one}
  assert set(np.concatenate(held)) == set(range(rows))
  assert any(np.ptp(rows_N) >= one for rows_N in held) == apart


def carry_specs(name, mesh, rows):
  """Returns {path: (shape, spec)} of each leaf."""
  made = Model(32, tiny.ARCHITECTURES[name].cell(), tiny.D)

  def carry(rng):
    params = initialize(made, rng, rows, tiny.T)
    return empty_carry(made, params, rows)

  shapes = jax.eval_shape(carry, jax.random.key(0))
  return {
    partition.path_string(path): (
      leaf.shape,
      partition.carry_spec(mesh, partition.path_string(path), leaf.shape),
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
  }


@pytest.mark.parametrize(
  'name',
  ['window', 'window_scanned', 'memorizing', 'recurrent_fixed_skip', 'lstm'],
)
def test_a_carry_is_sharded_by_rows_and_keys_and_values_by_heads(name):
  mesh = partition.make_mesh(2, 2, tiny.H, devices=jax.devices()[: 4 * tiny.H])
  found = carry_specs(name, mesh, rows=8)
  cut = 0
  for shape, spec in found.values():
    assert spec[0] == partition.BATCH_AXES
    axes = [i for i, axis in enumerate(spec) if axis == 'model']
    assert all(shape[axis] == tiny.H for axis in axes)
    cut += len(axes)
  assert cut == sum(
    path.rpartition('/')[2] in ('k', 'v', 'keys', 'values') for path in found
  )
  assert cut or name == 'lstm'


def test_heads_that_do_not_divide_are_not_sharded():
  mesh = partition.make_mesh(1, 1, 8)
  shape = 4, 16, 3, 10
  spec = partition.carry_spec(mesh, '0/k', shape)
  assert spec == PartitionSpec(partition.BATCH_AXES, None, None, None)


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
  """Returns the shape and spec of each leaf, in the tree's order."""
  return [(leaf.shape, leaf.sharding.spec) for leaf in jax.tree.leaves(tree)]


def moments(opt_state, params) -> list:
  """Returns the parts of a state that are trees like the parameters."""
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
    (optimizer.adafactor, {}, 2),  # Momentum, and v: no axis is 128 wide.
    (optimizer.adafactor, {'every': 2}, 3),
    (functools.partial(optimizer.adafactor, momentum=None), {}, 1),
    (optax.lion, {}, 1),
  ],
)
def test_moments_and_averages_are_sharded_like_parameters(
  rule, settings, count
):
  found = state(rule, **settings)
  wanted = facts(found.params)
  assert {'fsdp', 'model'} <= {axis for _, spec in wanted for axis in spec}
  parts = moments(found.opt_state, found.params)
  assert len(parts) == count
  for part in (*parts, found.ema):
    assert facts(part) == wanted
