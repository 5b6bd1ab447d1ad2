"""One rule for each parameter; sharded equals unsharded (law 9)."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from meliad_rec.distributed import partition
from meliad_rec.distributed.fsdp import all_gather_params
from meliad_rec.metrics import losses
from meliad_rec.models.model import empty_carry
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from meliad_rec.planning import topology
from tests import architectures as tiny
from tests.libtpu import needs_libtpu

B, T, V = 8, tiny.T, 32  # V is even, so that the embedding is cut too.
MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8)]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
  """Sizes that 8 devices divide; those of other tests would stay whole."""
  widen(monkeypatch, num_heads=tiny.H, head_dim=20)


def widen(monkeypatch, num_heads, head_dim):
  """Gives all architectures these heads, and 40 and 56 numbers."""
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
  """Law 9, first half; and each part that should be cut is cut."""
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
  with pytest.raises(ValueError, match='cell/new/thing matches 0 sharding'):
    partition.logical_axes('cell/new/thing')


def test_what_does_not_divide_stays_whole():
  mesh = partition.make_mesh(2, 2, 2)
  spec = partition.param_spec(mesh, 'embed/embedding', (31, 20))
  assert spec == PartitionSpec(None, 'fsdp')


def test_stacked_layers_are_whole_in_front():
  mesh = partition.make_mesh(2, 2, 2)
  spec = partition.param_spec(mesh, 'cell/mlp/hidden/kernel', (3, 20, 28))
  assert spec == PartitionSpec(None, 'fsdp', 'model')


def places(params, mesh):
  """A sharding for each parameter."""

  def place(path, leaf):
    spec = partition.param_spec(mesh, partition.path_string(path), leaf.shape)
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(place, params)


def unstacked(params):
  """As a training step gathers them."""
  return all_gather_params(params, stacked=False)


def loss_of(made, all_gather_params=unstacked):
  """(params, carry, tokens_BT) -> the loss of a batch, and the new carry."""

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
  """The loss of a batch and its gradients, computed over a mesh."""
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
  """Of all numbers in parameters, those in one that several devices share."""
  size, cut = 0, 0
  for path, leaf in jax.tree_util.tree_leaves_with_path(shapes(name)):
    spec = partition.param_spec(mesh, partition.path_string(path), leaf.shape)
    size += leaf.size
    cut += leaf.size * any(axis and mesh.shape[axis] > 1 for axis in spec)
  return cut / size


def assert_sharded_equals_unsharded(name, shape):
  mesh = partition.make_mesh(*shape)
  # An LSTM is whole over model.
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


def test_the_mesh_must_use_up_the_devices():
  with pytest.raises(ValueError, match='needs 6 devices; there are 8'):
    partition.make_mesh(2, 3, 1)
  with pytest.raises(ValueError, match='needs 16 devices; there are 8'):
    partition.make_mesh(fsdp=16)
  for axis, size in ('fsdp', 0), ('model', -8), ('data', 0):
    with pytest.raises(ValueError, match=f'{axis} is {size}; it needs 1 or m'):
      partition.make_mesh(**{axis: size})
  assert partition.make_mesh(model=2).shape == {
    'data': 4,
    'fsdp': 1,
    'model': 2,
  }


def test_rows_must_divide():
  mesh = partition.make_mesh(4, 2, 1)
  with pytest.raises(ValueError, match='12 rows does not divide over 8'):
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
  """Each holds as many; some the same, where a model axis spans them."""
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
