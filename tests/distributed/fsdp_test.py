"""Parameters are gathered before they are read, and stored sharded."""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest

from meliad_rec.archs.stack import layers
from meliad_rec.archs.window import WindowLayer
from meliad_rec.distributed import partition
from meliad_rec.distributed.fsdp import all_gather_params
from meliad_rec.layers.layer_config import LayerConfig
from meliad_rec.models.model import empty_carry
from meliad_rec.models.model import initialize
from meliad_rec.models.model import Model
from tests.distributed import partition_test

B, T, V = partition_test.B, partition_test.T, 64


def gathered(shape):
  """Returns specs of parameters before and after `all_gather_params`."""
  mesh = partition.make_mesh(*shape)
  rng = np.random.default_rng(0)
  params = {
    'gate': {'hidden': {'kernel': rng.normal(size=(20, 28))}},
    'layer': {'mlp': {'output': {'kernel': rng.normal(size=(28, 20))}}},
    'norm': {'scale': rng.normal(size=20)},
  }
  spec = lambda path, a: partition.param_spec(
    mesh, partition.path_string(path), a.shape
  )
  put = lambda path, a: jax.device_put(
    a.astype(np.float32), NamedSharding(mesh, spec(path, a))
  )
  cut = jax.tree_util.tree_map_with_path(put, params)
  with jax.set_mesh(mesh):
    whole = jax.jit(all_gather_params)(cut)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-6), whole, params
  )
  places = lambda tree: [
    tuple(a.sharding.spec) + (None,) * (a.ndim - len(a.sharding.spec))
    for a in jax.tree.leaves(tree)
  ]
  return places(cut), places(whole)


def test_parameters_are_gathered_along_fsdp_only():
  cut, whole = gathered((2, 2, 2))
  assert cut == [('fsdp', 'model'), ('model', 'fsdp'), (None,)]
  assert whole == [(None, 'model'), ('model', None), (None,)]


def test_other_parameters_are_unchanged():
  cut, whole = gathered((4, 1, 2))
  # An axis of size 1 does not shard.
  bare = [tuple(a if a != 'fsdp' else None for a in spec) for spec in cut]
  assert bare == [
    tuple(a if a != 'fsdp' else None for a in spec) for spec in whole
  ]
  assert bare == [(None, 'model'), ('model', None), (None,)]
  params = {'no rule': jnp.ones(3)}
  assert all_gather_params(params) is params  # There is no mesh.


def step_of(scan, **options):
  """Returns (params, carry, tokens_BT) -> (loss, gradients), and arguments.

  The model has two layers, whose widths all divide by 8.
  """
  sizes = {'num_heads': 2, 'head_dim': 12, 'mlp_dim': 40, 'window': 8}
  config = LayerConfig(d_model=24, **sizes)
  layer = functools.partial(WindowLayer, config)
  model = Model(V, layers(2, layer, scan=scan), 24)
  params = jax.jit(lambda rng: initialize(model, rng, B, T))(jax.random.key(0))
  carry = empty_carry(model, params, B)
  tokens_BT = jax.random.randint(jax.random.key(1), (B, T), 1, V)
  loss = partition_test.loss_of(model, **options)
  step = jax.value_and_grad(lambda *given: loss(*given)[0])
  return step, (params, carry, tokens_BT)


def compiled(step, given, shape):
  """Returns the program of a step over a mesh, and its results."""
  mesh = partition.make_mesh(*shape)
  rows = partition.batch_sharding(mesh, B)
  places = partition_test.places(given[0], mesh)
  with jax.set_mesh(mesh):
    cut = jax.jit(
      step, in_shardings=(places, rows, rows), out_shardings=(None, places)
    )
    return cut.lower(*given).compile().as_text(), cut(*given)


def shapes(text):
  """Returns the shapes that a program gathers."""
  found = re.findall(r'= \w+\[([\d,]+)\]\S* all-gather\(', text)
  return {tuple(map(int, dims.split(','))) for dims in found}


@pytest.mark.parametrize(
  'scan', [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_parameters_are_gathered_and_not_activations(scan):
  step, given = step_of(scan)
  text, found = compiled(step, given, (1, 8, 1))
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-3),
    jax.device_get(found),
    jax.device_get(step(*given)),
  )
  # Of stacked layers, the parameters of one.
  parameters = {leaf.shape[-2:] for leaf in jax.tree.leaves(given[0])}
  parameters |= {shape[::-1] for shape in parameters}
  parameters |= {(1, *shape) for shape in parameters}
  tokens = {(B, T), (B, T, 1), (B, T + 1)}
  assert shapes(text) & parameters
  assert shapes(text) <= parameters | tokens


def test_on_its_own_the_compiler_gathers_activations():
  step, given = step_of(False, all_gather_params=lambda params: params)
  text, _ = compiled(step, given, (1, 8, 1))
  assert max(map(len, shapes(text))) == 3
