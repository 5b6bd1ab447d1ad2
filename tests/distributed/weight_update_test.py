"""Replicas divide the update: parts of moments, and the steps of one device."""

import functools
import math

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from meliad_rec.data.batch import Batch
from meliad_rec.distributed import partition
from meliad_rec.metrics import losses
from meliad_rec.models.model import empty_carry
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from meliad_rec.planning import estimate
from meliad_rec.planning import hlo
from meliad_rec.planning import topology
from meliad_rec.training import optimizer
from meliad_rec.training.program import TrainProgram
from tests import architectures as tiny
from tests.libtpu import needs_libtpu

ROWS, T, V = 8, tiny.T, 32
RULES = {
  'adamw': (functools.partial(optimizer.adamw, eps=1e-3), {'every': 2}),
  'adafactor': (optimizer.adafactor, {'clip_norm': 1.0}),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
  """Sizes that divide over 8 devices, and updates of small arrays divided."""
  resize(monkeypatch, d_model=16, num_heads=2, head_dim=8, mlp_dim=32)
  monkeypatch.setattr(partition, 'DIVIDED', 64)


@pytest.mark.parametrize('axes', [('data',), ('data', 'fsdp', 'model')])
@pytest.mark.parametrize('mapped', [False, True])
def test_a_model_has_gradients_on_the_mesh_of_a_user(axes, mapped):
  """Without some axes, or within a shard_map, nothing is divided."""
  model = Model(V, tiny.ARCHITECTURES['window_scanned'].cell(), tiny.D)
  params = initialize(model, jax.random.key(0), ROWS, T)
  tokens_BT = np.arange(ROWS * T, dtype=np.int32).reshape(ROWS, T) % V

  def gradients(params, tokens_BT):
    B = len(tokens_BT)
    given = tokens_BT, np.ones(B, bool), np.ones((B, T), bool)

    def loss(params):
      carry = empty_carry(model, params, B)
      return model.apply({'params': params}, carry, *given)[1].mean()

    return jax.grad(loss)(params)

  expected = jax.jit(gradients)(params, tokens_BT)
  sizes = (4,) + (1,) * (len(axes) - 1)
  types = (AxisType.Auto,) * len(axes)
  mesh = jax.make_mesh(sizes, axes, types, devices=jax.devices()[:4])
  call = gradients
  if mapped:
    call = jax.shard_map(
      lambda *a: jax.lax.pmean(gradients(*a), 'data'),
      mesh=mesh,
      in_specs=(PartitionSpec(), PartitionSpec('data')),
      out_specs=PartitionSpec(),
      check_vma=False,
    )
  with jax.set_mesh(mesh):
    found = jax.jit(call)(params, tokens_BT)
  for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)


def resize(monkeypatch, **sizes):
  monkeypatch.setattr(tiny, 'CONFIG', tiny.config(**sizes))
  monkeypatch.setattr(tiny, 'D', sizes['d_model'])


def program(rule, mesh, name='window_scanned', vocab=V, **settings):
  rule, of_chain = RULES[rule]
  return TrainProgram(
    model=Model(vocab, tiny.ARCHITECTURES[name].cell(), tiny.D),
    optimizer=optimizer.chain(rule, lambda step: 0.01, **of_chain),
    objective=losses.objective,
    mesh=mesh,
    rows=ROWS,
    segment=T,
    **settings,
  )


def batch(made, seed):
  rng = np.random.default_rng(seed)
  ids = rng.integers(1, V, (ROWS, T + 1)).astype(np.int32)
  scored = rng.random((ROWS, T)) < 0.8
  given = made.empty_batch(ROWS)
  return Batch(
    **{
      **vars(given),
      'tokens_BT': ids[:, :-1],
      'targets_BT': ids[:, 1:],
      'mask_BT': np.ones((ROWS, T), bool),
      'scored_BT': scored,
    }
  )


def trained(made):
  """Returns the state after three steps, and the norms of their gradients."""
  state, norms = made.create(0), []
  for seed in range(3):
    state, sums = made.train_step(state, made.put(batch(made, seed), ROWS))
    norms.append(float(sums.gradient_norm))
  return state, norms


@pytest.mark.parametrize(
  'rule, shape',
  [
    ('adamw', (4, 1, 2)),
    pytest.param('adamw', (8, 1, 1), marks=pytest.mark.slow),
    pytest.param('adafactor', (8, 1, 1), marks=pytest.mark.slow),
    pytest.param('adafactor', (4, 2, 1), marks=pytest.mark.slow),
    pytest.param('adamw', (2, 2, 2), marks=pytest.mark.slow),
  ],
)
def test_replicas_take_the_steps_of_one_device(rule, shape):
  one = partition.make_mesh(1, devices=jax.devices()[:1])
  wanted, norms = trained(program(rule, one, ema_decay=0.9))
  mesh = partition.make_mesh(*shape)
  state, found_norms = trained(program(rule, mesh, ema_decay=0.9))
  np.testing.assert_allclose(found_norms, norms, rtol=1e-4)
  close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-3)
  for part in 'params', 'ema', 'opt_state':
    jax.tree.map(close, getattr(state, part), getattr(wanted, part))
  held = lambda leaf: leaf.addressable_shards[0].data.size
  large = [a for a in jax.tree.leaves(state.opt_state) if a.size >= 16 * 16]
  parts = math.prod(shape)
  assert large and {leaf.size // held(leaf) for leaf in large} == {parts}
  table_VD = state.params['embed']['embedding']
  assert table_VD.size // held(table_VD) == parts // shape[0]


@pytest.mark.parametrize(
  'path, size, shape, wanted',
  [
    ('mlp/hidden/kernel', (16, 32), (4, 1, 2), ('data', 'model')),
    ('mlp/hidden/kernel', (16, 32), (4, 2, 1), ('fsdp', 'data')),
    ('mlp/hidden/kernel', (16, 32), (2, 2, 2), (('fsdp', 'data'), 'model')),
    ('mlp/hidden/kernel', (18, 32), (2, 2, 2), ('fsdp', ('model', 'data'))),
    ('mlp/hidden/kernel', (12, 32), (8, 1, 1), ('fsdp', 'data')),  # 12 % 8
    (
      'layer/mlp/hidden/kernel',
      (8, 16, 32),
      (8, 1, 1),
      (None, 'data', 'model'),
    ),
    ('norm/scale', (32,), (8, 1, 1), (None,)),  # Few elements.
    ('position/table', (9, 15), (8, 1, 1), (None, None)),  # Does not divide.
  ],
)
def test_an_unsharded_axis_is_divided_among_replicas(path, size, shape, wanted):
  mesh = partition.make_mesh(*shape)
  assert partition.update_spec(mesh, path, size) == PartitionSpec(*wanted)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize('name', ['recurrent_fixed_skip', 'window_scanned'])
def test_a_tpu_scatters_gradients_and_gathers_parameters(name, monkeypatch):
  """Whole sums remain only for what is too small to divide."""
  monkeypatch.setattr(partition, 'DIVIDED', 2**16)
  resize(monkeypatch, d_model=256, num_heads=2, head_dim=128, mlp_dim=512)
  mesh = partition.make_mesh(4, devices=topology.devices('v5e:2x2'))
  made = program('adafactor', mesh, name, vocab=1024)
  compiled = hlo.read(made.train_step.as_text())
  found = estimate.exchanges(compiled, mesh, topology.parse('v5e:2x2'))
  moved = {one.op: one.size for one in found}
  size = sum(4 * leaf.size for leaf in jax.tree.leaves(made.shapes.params))
  assert 0.9 * size < moved['all-gather'] < 1.1 * size
  assert 0.9 * size < moved['reduce-scatter'] < 1.1 * size
  assert moved['all-reduce'] < 0.02 * size
