"""What devices exchange in a step: sums of gradients, and parts of parameters.

Rows, and with them states and lanes, are sharded over data and fsdp and are
never gathered: only parameters are, along fsdp. The compiler may reshard the
embedding table to look up tokens.
"""

import functools
import itertools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import pytest

from meliad_rec.archs.block_recurrent import BlockRecurrentLayer
from meliad_rec.distributed import partition
from meliad_rec.models.model import empty_carry
from meliad_rec.planning import hlo
from tests import architectures as tiny
from tests.distributed import partition_test
from tests.distributed.partition_test import B
from tests.distributed.partition_test import T

# Architectures that gather tokens or states along model, and what.
WHOLE = {'recurrent_fixed_single': 'heads: its MLP has no projection before it'}
# Gathers keys if model shards within the one head that all queries share.
SHARED = ('recurrent_shared_keys',)
# Gradients that are resharded: the router's kernel, the LSTM's input kernel.
RESHARDED = (
  ('sparse_universal', 'collective-permute', (4, 20)),
  ('lstm', 'collective-permute', (160, 20)),
)
_OP = re.compile(rf' = .* ({"|".join(hlo.COLLECTIVES)})(?:-start)?\(')


def each(*fast):
  """All architectures; only these are not slow."""
  return pytest.mark.parametrize(
    'name',
    [
      pytest.param(name, marks=[] if name in fast else pytest.mark.slow)
      for name in tiny.ARCHITECTURES
    ],
  )


@pytest.fixture(autouse=True)
def wide(monkeypatch):
  """Also gives a number of heads that divides over 8 devices."""
  partition_test.widen(monkeypatch, num_heads=8, head_dim=10)


def program(name, mesh) -> str:
  """Returns a step's gradients and new state, compiled over a mesh."""
  made = partition_test.model(name)
  params = partition_test.shapes(name)
  carry = jax.eval_shape(lambda p: empty_carry(made, p, B), params)
  rows = partition.batch_sharding(mesh, B)

  carried = partition_test.places(carry, mesh, partition.carry_spec)
  places = partition_test.places(params, mesh)
  tokens_BT = jax.ShapeDtypeStruct((B, T), jnp.int32)
  with jax.set_mesh(mesh):
    step = jax.jit(
      jax.value_and_grad(partition_test.loss_of(made), has_aux=True),
      in_shardings=(places, carried, rows),
      out_shardings=((None, carried), places),
    )
    return step.lower(params, carry, tokens_BT).compile().as_text()


class Exchange(NamedTuple):
  """A collective in a program."""

  op: str
  along: str  # The axes along which it runs.
  shape: tuple[int, ...]  # Of its result, or of the first of several.


@functools.cache
def exchanges(name, shape) -> list[Exchange]:
  """Returns those of a step, without those of the embedding lookup."""
  mesh = partition.make_mesh(*shape)
  found = []
  for line in program(name, mesh).splitlines():
    # The sum of all gradients may have the name of any of them.
    looks_up = 'jit(_take)' in line and ' all-reduce(' not in line
    if (match := _OP.search(line)) and not looks_up:
      along = hlo.axes(hlo.groups(line, mesh.size), dict(mesh.shape))
      sizes = re.search(r' = \(?\w+\[([\d,]*)\]', line)[1]
      made = tuple(int(size) for size in sizes.split(',') if size)
      found.append(Exchange(match[1], '+'.join(along), made))
  return found


def kinds(found) -> set[tuple[str, str]]:
  return {(exchange.op, exchange.along) for exchange in found}


def whole_along_fsdp(name, mesh) -> list[tuple[int, ...]]:
  """Returns the gathered shapes, per device, of parameters over fsdp."""
  found = []
  params = jax.tree_util.tree_leaves_with_path(partition_test.shapes(name))
  for path, leaf in params:
    spec = partition.param_spec(mesh, partition.path_string(path), leaf.shape)
    if 'fsdp' in spec:
      rest = PartitionSpec(*(axis if axis != 'fsdp' else None for axis in spec))
      found.append(NamedSharding(mesh, rest).shard_shape(leaf.shape))
  return found


def unstacked(exchange) -> tuple[int, ...]:
  """Returns the shape of the result without leading axes of size 1."""
  return (*itertools.dropwhile(lambda size: size == 1, exchange.shape),)


def is_parameter(exchange, whole) -> bool:
  """Whether the result is one of these, or one layer of a scan's stack."""
  parts = (one[i:] for one in whole for i in range(len(one) - 1))
  return unstacked(exchange) in parts


@each('universal')
def test_replicas_only_sum_gradients(name):
  assert kinds(exchanges(name, (8, 1, 1))) == {('all-reduce', 'data')}


@each('recurrent_fixed_skip')
def test_parameters_are_gathered_once_in_each_direction(name):
  """Nothing else is gathered if they and the rows are sharded over one axis."""
  found = exchanges(name, (1, 8, 1))
  assert kinds(found) == {('all-gather', 'fsdp'), ('all-reduce', 'fsdp')}
  mesh = partition.make_mesh(1, 8, 1)
  gathered = [found for found in found if found.op == 'all-gather']
  whole = whole_along_fsdp(name, mesh)
  assert len(whole) / 2 < len(gathered) <= 2 * len(whole)
  assert all(is_parameter(found, whole) for found in gathered)
  if name == 'window_scanned':  # One layer at a time.
    assert max(len(unstacked(found)) for found in gathered) == 2


def of_tokens(name, found) -> list[Exchange]:
  """Drops sums and exchanges without tokens: distance biases, whole tables."""
  params = {leaf.shape for leaf in jax.tree.leaves(partition_test.shapes(name))}
  return [
    exchange
    for exchange in found
    if exchange.op != 'all-reduce'
    and math.prod(exchange.shape) > tiny.H * tiny.W
    and exchange.shape not in params
  ]


@each('recurrent_fixed_skip')
def test_heads_and_hidden_units_are_summed_and_never_gathered(name):
  found = exchanges(name, (1, 1, 8))
  assert of_tokens(name, found) == [] or name in WHOLE
  assert kinds(found) <= {('all-reduce', 'model'), ('all-gather', 'model')}


def gathered_rows(name, found) -> list[Exchange]:
  """Returns exchanges on a (2, 2, 2) mesh that are neither sums nor parameters.

  Along data or fsdp all of them are wrong; along model, those of tokens or
  states.
  """
  whole = whole_along_fsdp(name, partition.make_mesh(2, 2, 2))
  over_model = [exchange for exchange in found if exchange.along == 'model']
  strange = [] if name in (*WHOLE, *SHARED) else of_tokens(name, over_model)
  for exchange in found:
    match exchange.op, exchange.along:
      case ('all-reduce', _) | (_, 'model'):
        pass
      case ('all-gather', 'fsdp') if is_parameter(exchange, whole):
        pass
      case op, _ if (name, op, exchange.shape) not in RESHARDED:
        strange.append(exchange)
  return strange


@each('recurrent_fixed_skip')
def test_rows_are_never_gathered_on_a_mesh_of_three_axes(name):
  found = exchanges(name, (2, 2, 2))
  assert ('all-gather', 'fsdp') in kinds(found)  # The parameters.
  assert gathered_rows(name, found) == []


@pytest.mark.slow
def test_gathered_states_are_found(monkeypatch):
  """pytest -m slow tests/collectives_test.py"""
  seen = BlockRecurrentLayer.seen
  over_data = NamedSharding(partition.make_mesh(2, 2, 2), PartitionSpec('data'))

  def gathering(self, state):
    past, s_BSD = state
    s_BSD = jax.lax.with_sharding_constraint(s_BSD, over_data)
    return seen(self, (past, s_BSD))

  monkeypatch.setattr(BlockRecurrentLayer, 'seen', gathering)
  name = 'recurrent_fixed_skip'
  found = gathered_rows(name, exchanges.__wrapped__(name, (2, 2, 2)))
  states = Exchange('all-gather', 'fsdp', (B // 2, tiny.S, tiny.D))
  assert states in found
