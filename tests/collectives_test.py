"""What devices exchange in a step: sums of gradients, and parts of parameters.

Rows, and with them states and lanes, are cut over data and fsdp. Nothing but
parameters is gathered, so that nothing is gathered along data; the compiler may
lay out the table of vectors anew to look up tokens in it.
"""

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

FAST = ('recurrent_fixed_skip',)
every = pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.slow)
    for name in tiny.ARCHITECTURES
  ],
)
_OP = re.compile(rf' = .* ({"|".join(hlo.COLLECTIVES)})(?:-start)?\(')


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


def exchanged(name, shape) -> set[tuple[str, str]]:
  """Each collective and the axes along which it runs."""
  mesh = partition.make_mesh(*shape)
  found = set()
  for line in program(name, mesh).splitlines():
    # Sums of all gradients together may bear any one's name.
    looks_up = 'jit(_take)' in line and ' all-reduce(' not in line
    if (match := _OP.search(line)) and not looks_up:
      along = groups.axes(groups.groups(line, mesh.size), dict(mesh.shape))
      found.add((match[1], '+'.join(along)))
  return found


@every
def test_copies_of_all_parameters_add_up_gradients_alone(name):
  assert exchanged(name, (8, 1, 1)) == {('all-reduce', 'data')}


@every
def test_nothing_is_gathered_along_the_rows(name):
  found = exchanged(name, (2, 2, 2))
  assert ('all-gather', 'fsdp') in found  # The parameters.
  for op, along in found:
    assert op == 'all-reduce' or 'data' not in along
