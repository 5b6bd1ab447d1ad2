"""What devices exchange in a step: sums of gradients, and parts of parameters.

Rows, and with them states and lanes, are cut over data and fsdp. Nothing but
parameters is gathered, so that nothing is gathered along data; the compiler may
lay out the table of vectors anew to look up tokens in it.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import pytest

from meliad_rec import partition
from meliad_rec import state_sharding
from meliad_rec.model import empty_carry
from meliad_rec.model import initialize
from meliad_rec.planning import groups
from meliad_rec.planning import hlo
from tests import architectures as tiny
from tests import partition_test
from tests.partition_test import B
from tests.partition_test import T

FAST = ('recurrent_fixed_skip', 'universal')
# An LSTM needs its whole hidden vector for each token; the MLP of this gate
# reads heads without a projection before it.
WHOLE = ('lstm', 'recurrent_fixed_single')
every = pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.slow)
    for name in tiny.ARCHITECTURES
  ],
)
_OP = re.compile(rf' = .* ({"|".join(hlo.COLLECTIVES)})(?:-start)?\(')


@pytest.fixture(autouse=True)
def wide(monkeypatch):
  """Heads, too, that 8 devices divide."""
  partition_test.widen(monkeypatch, heads=8, head_width=10)


def program(name, mesh) -> str:
  """A step's gradients and its new state, compiled over a mesh."""
  made = partition_test.model(name)
  key = jax.random.key(0)
  params = jax.eval_shape(lambda rng: initialize(made, rng, B, T), key)
  carry = jax.eval_shape(lambda p: empty_carry(made, p, B), params)
  rows = partition.batch_sharding(mesh, B)

  def state_place(path, leaf):
    name = partition.path_string(path)
    spec = state_sharding.carry_spec(mesh, name, leaf.shape)
    return NamedSharding(mesh, spec)

  carried = jax.tree_util.tree_map_with_path(state_place, carry)
  places = partition_test.places(params, mesh)
  tokens_BT = jax.ShapeDtypeStruct((B, T), jnp.int32)
  with jax.set_mesh(mesh):
    step = jax.jit(
      jax.value_and_grad(partition_test.loss_of(made), has_aux=True),
      in_shardings=(places, carried, rows),
      out_shardings=((None, carried), places),
    )
    return step.lower(params, carry, tokens_BT).compile().as_text()


@dataclasses.dataclass(frozen=True)
class Exchange:
  """A collective in a program.

  Attributes:
    op: its name.
    along: the axes along which it runs.
    shape: of what it makes; of several things, of the first.
  """

  op: str
  along: str
  shape: tuple[int, ...]


@functools.cache
def exchanges(name, shape) -> list[Exchange]:
  """Those of a step; but not of the table in which tokens are looked up."""
  mesh = partition.make_mesh(*shape)
  found = []
  for line in program(name, mesh).splitlines():
    # Sums of all gradients together may bear any one's name.
    looks_up = 'jit(_take)' in line and ' all-reduce(' not in line
    if (match := _OP.search(line)) and not looks_up:
      along = groups.axes(groups.groups(line, mesh.size), dict(mesh.shape))
      sizes = re.search(r' = \(?\w+\[([\d,]*)\]', line)[1]
      made = tuple(int(size) for size in sizes.split(',') if size)
      found.append(Exchange(match[1], '+'.join(along), made))
  return found


def kinds(found) -> set[tuple[str, str]]:
  return {(exchange.op, exchange.along) for exchange in found}


@every
def test_copies_of_all_parameters_add_up_gradients_alone(name):
  assert kinds(exchanges(name, (8, 1, 1))) == {('all-reduce', 'data')}


@every
def test_parameters_are_gathered_once_in_each_direction(name):
  """And nothing else is, where they and the rows are cut over one axis."""
  found = exchanges(name, (1, 8, 1))
  assert kinds(found) == {('all-gather', 'fsdp'), ('all-reduce', 'fsdp')}
  mesh = partition.make_mesh(1, 8, 1)
  cut = [
    leaf.shape
    for path, leaf in jax.tree_util.tree_leaves_with_path(
      partition_test.shapes(name)
    )
    if 'fsdp'
    in partition.param_spec(mesh, partition.path_string(path), leaf.shape)
  ]
  gathered = [found.shape for found in found if found.op == 'all-gather']
  assert len(cut) / 2 < len(gathered) <= 2 * len(cut)
  # One layer of several in a scan, or all of them.
  layers = {shape[i:] for shape in cut for i in range(len(shape))}
  assert {shape[shape.count(1) :] for shape in gathered} <= layers


@every
def test_heads_and_hidden_units_are_added_up_and_never_gathered(name):
  """But what is of no token: biases by distance, gradients of whole tables."""
  found = exchanges(name, (1, 1, 8))
  params = {leaf.shape for leaf in jax.tree.leaves(partition_test.shapes(name))}
  others = [
    exchange
    for exchange in found
    if exchange.op != 'all-reduce'
    and math.prod(exchange.shape) > tiny.H * tiny.W
    and exchange.shape not in params
  ]
  assert others == [] or name in WHOLE
  assert kinds(found) <= {('all-reduce', 'model'), ('all-gather', 'model')} or (
    name == 'lstm'
  )


@every
def test_nothing_is_gathered_along_the_rows(name):
  found = kinds(exchanges(name, (2, 2, 2)))
  assert ('all-gather', 'fsdp') in found  # The parameters.
  for op, along in found:
    assert op == 'all-reduce' or 'data' not in along
