"""One rule per parameter; sharded equals unsharded (law 9); train states.

What devices exchange for it is in collectives_test.py.
"""

import functools
import itertools

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
from meliad_rec.training import optimizer
from meliad_rec.training import schedules
from meliad_rec.training.program import TrainProgram
from tests import architectures as tiny
from tests.libtpu import needs_libtpu

B, T, V = 8, tiny.T, 32  # V is even, so that the embedding is sharded too.
MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8)]
FAST = 'recurrent_shared_keys', (2, 2, 2)  # What is tested always.


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
  with pytest.raises(ValueError, match='cell/new/thing .*matches 0'):
    partition.logical_axes('cell/new/thing')
  shape = 4, 4
  with pytest.raises(ValueError, match='cell/new/thing .*or use one device'):
    partition.param_spec(partition.make_mesh(8), 'cell/new/thing', shape)
  one = partition.make_mesh(devices=jax.devices()[:1])
  assert partition.param_spec(one, 'cell/new/thing', shape) == PartitionSpec()


def test_axes_of_layers_and_odd_sizes_are_not_sharded():
  mesh = partition.make_mesh(2, 2, 2)
  spec = partition.param_spec(mesh, 'embed/embedding', (31, 20))
  assert spec == PartitionSpec(None, 'fsdp')
  spec = partition.param_spec(mesh, 'cell/mlp/hidden/kernel', (3, 20, 28))
  assert spec == PartitionSpec(None, 'fsdp', 'model')
  over_heads = partition.make_mesh(1, 1, 8)
  spec = partition.carry_spec(over_heads, '0/k', (4, 16, 3, 10))
  assert spec == PartitionSpec(partition.BATCH_AXES, None, None, None)


def places(tree, mesh, spec=partition.param_spec):
  """Returns a sharding for each parameter, or for each leaf of a carry."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: NamedSharding(
      mesh, spec(mesh, partition.path_string(path), leaf.shape)
    ),
    tree,
  )


@pytest.mark.parametrize(
  'name, stacked',
  [
    ('window_scanned', True),
    ('repeated', False),
    ('repeated_recurrent', False),
  ],
)
def test_only_layers_with_parameters_of_their_own_are_stacked(name, stacked):
  """A recurrent layer's own output matrices are stacks, but not of layers."""
  params = shapes(name)
  wanted = {
    path
    for path in partition.leaves_by_path(params)
    if stacked and path.startswith('cell/')
  }
  assert partition.stacked_paths(params) == wanted


def test_parameters_are_gathered_along_fsdp_only():
  """Those of layers stacked for a scan are gathered only if `stacked`."""
  mesh = partition.make_mesh(2, 2, 2)
  rng = np.random.default_rng(0)
  params = {
    'a': {
      'cell': {'mlp': {'output': {'kernel': rng.normal(size=(3, 28, 20))}}}
    },
    'gate': {'hidden': {'kernel': rng.normal(size=(20, 28))}},
    'norm': {'scale': rng.normal(size=20)},
  }
  params = jax.tree.map(np.float32, params)
  cut = jax.device_put(params, places(params, mesh))
  odd = {'no rule': jnp.ones(2)}
  with jax.set_mesh(mesh):
    whole, half = (
      jax.jit(functools.partial(all_gather_params, stacked=stacked))(cut)
      for stacked in (True, False)
    )
    assert all_gather_params(odd)['no rule'] is odd['no rule']
  assert all_gather_params(params) is params  # There is no mesh.
  here = lambda tree: [
    leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(tree)
  ]
  assert here(cut) == [(3, 14, 10), (10, 14), (20,)]
  assert here(whole) == [(3, 14, 20), (20, 14), (20,)]
  assert here(half) == [(3, 14, 10), (20, 14), (20,)]
  jax.tree.map(np.testing.assert_array_equal, whole, params)
  jax.tree.map(np.testing.assert_array_equal, half, params)


def loss_of(made):
  """Returns (params, carry, tokens_BT) -> (loss of a batch, new carry)."""

  def loss(params, carry, tokens_BT):
    start_B = jnp.arange(B) % 3 == 0
    mask_BT = jnp.arange(T) < T - jnp.arange(B)[:, None]
    # Like a training step.
    variables = {'params': all_gather_params(params, stacked=False)}
    after, logits_BTV = made.apply(
      variables, carry, tokens_BT, start_B, mask_BT
    )
    nats_BT = losses.cross_entropy(logits_BTV, jnp.roll(tokens_BT, -1, 1))
    return losses.masked_mean(nats_BT, mask_BT), after

  return loss


def gradients(made, mesh, params, *given):
  """Returns the loss of a batch and its gradients, computed over a mesh."""
  loss = lambda *arguments: loss_of(made)(*arguments)[0]
  rows = partition.batch_sharding(mesh, B)
  shardings = places(params, mesh), rows, rows
  with jax.set_mesh(mesh):
    step = jax.jit(jax.value_and_grad(loss), in_shardings=shardings)
    return jax.device_get(step(params, *given))


def share_cut(name, mesh) -> float:
  """Returns the share of all numbers that are in sharded parameters."""
  params = shapes(name)
  size, cut = 0, 0
  for leaf, place in zip(
    *map(jax.tree.leaves, (params, places(params, mesh))), strict=True
  ):
    size += leaf.size
    cut += leaf.size * (place.shard_shape(leaf.shape) != leaf.shape)
  return cut / size


@pytest.mark.parametrize(
  'name, shape',
  [
    pytest.param(*given, marks=[] if given == FAST else pytest.mark.slow)
    for given in itertools.product(tiny.ARCHITECTURES, MESHES)
  ],
)
def test_sharded_equals_unsharded(name, shape):
  """Law 9, second half: pytest -m slow tests/distributed/partition_test.py"""
  mesh = partition.make_mesh(*shape)
  # An LSTM is not sharded over model.
  alike = shape == (8, 1, 1) or (name, shape) == ('lstm', (1, 1, 8))
  assert share_cut(name, mesh) > 0.5 or alike
  made = model(name)
  params = jax.jit(lambda rng: initialize(made, rng, B, T))(jax.random.key(0))
  carry = jax.eval_shape(lambda params: empty_carry(made, params, B), params)
  carry = jax.tree.map(lambda a: np.ones(a.shape, a.dtype), carry)
  given = params, carry, jax.random.randint(jax.random.key(1), (B, T), 1, V)
  one = partition.make_mesh(1, devices=jax.devices()[:1])
  loss, grads = gradients(made, one, *given)
  cut_loss, cut_grads = gradients(made, mesh, *given)
  np.testing.assert_allclose(cut_loss, loss, rtol=1e-5)
  close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-3)
  jax.tree.map(close, cut_grads, grads)


def test_the_mesh_must_match_the_devices():
  with pytest.raises(ValueError, match='needs 6 devices, but there are 8'):
    partition.make_mesh(2, 3, 1)
  with pytest.raises(ValueError, match='needs 16 devices, but there are 8'):
    partition.make_mesh(fsdp=16)
  for axis, size in ('fsdp', 0), ('model', -8), ('data', 0):
    with pytest.raises(ValueError, match=f'{axis} .* got {size}'):
      partition.make_mesh(**{axis: size})
  sizes = partition.make_mesh(model=2).shape
  assert sizes == {'data': 4, 'fsdp': 1, 'model': 2}


def test_documents_are_read_in_few_rows_that_divide_evenly():
  mesh = partition.make_mesh(2, 2, 2)
  found = [partition.rows_for(mesh, n, 12) for n in (1, 4, 5, 11, 12, 50)]
  assert found == [4, 4, 8, 12, 12, 12]


def test_rows_must_divide():
  with pytest.raises(ValueError, match='12 rows does not divide evenly into 8'):
    partition.batch_sharding(partition.make_mesh(4, 2, 1), 12)
  mesh = partition.make_mesh(2, 2, 2)
  assert partition.local_rows(mesh, 12).tolist() == list(range(12))


@needs_libtpu
@pytest.mark.parametrize(
  'name, axes, one, apart',
  [
    ('v5e:4x4', (16,), 4, True),
    ('v5e:16x16', (64, 1, 4), 2, False),
    ('v5p:4x4x4', (1, 64), 4, True),
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


@pytest.mark.parametrize(
  'name', ['window_scanned', 'memorizing', 'recurrent_fixed_skip', 'lstm']
)
def test_a_carry_is_sharded_by_rows_and_keys_and_values_by_heads(name):
  mesh = partition.make_mesh(2, 2, tiny.H, devices=jax.devices()[: 4 * tiny.H])
  carry = jax.eval_shape(lambda p: empty_carry(model(name), p, B), shapes(name))
  cut = 0
  for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
    path = partition.path_string(path)
    rows, *others = partition.carry_spec(mesh, path, leaf.shape)
    assert rows == partition.BATCH_AXES
    over = [
      size for size, axis in zip(leaf.shape[1:], others, strict=True) if axis
    ]
    of_heads = path.rpartition('/')[2] in ('k', 'v', 'keys', 'values')
    assert over == [tiny.H] * of_heads
    cut += of_heads
  assert cut or name == 'lstm'


def facts(tree):
  """Returns the shape and spec of each leaf, in the tree's order."""
  return [(leaf.shape, leaf.sharding.spec) for leaf in jax.tree.leaves(tree)]


def moments(opt_state, params) -> list:
  """Returns the parts of a state that are trees like the parameters."""
  form = lambda tree: jax.tree.map(lambda leaf: leaf.shape, tree)
  alike = lambda part: form(part) == form(params)
  return list(filter(alike, jax.tree.leaves(opt_state, is_leaf=alike)))


@pytest.mark.parametrize(
  'rule, settings, count',
  [
    # mu, nu and sums.
    (optimizer.adamw, {'every': 2, 'clip_norm': 1.0}, 3),
    (optimizer.adafactor, {}, 2),  # Momentum, and v: no axis is 128 wide.
  ],
)
def test_moments_and_averages_are_sharded_like_parameters(
  rule, settings, count
):
  program = TrainProgram(
    model=model('window_scanned'),
    optimizer=optimizer.chain(rule, schedules.rsqrt(10), **settings),
    objective=losses.objective,
    mesh=partition.make_mesh(2, 2, 2),
    rows=4,
    segment=T,
    ema_decay=0.9,
  )
  found = program.shapes
  wanted = facts(found.params)
  assert {'fsdp', 'model'} <= {axis for _, spec in wanted for axis in spec}
  parts = moments(found.opt_state, found.params)
  assert len(parts) == count
  for part in (*parts, found.ema):
    assert facts(part) == wanted
