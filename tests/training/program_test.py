"""Compiled steps: donated state, and sharded equals unsharded."""

import dataclasses

import jax
import numpy as np
import pytest

from meliad_rec.data.lanes import Lanes
from meliad_rec.storage.checksums import digest
from tests import tiny_run
from tests.counting import Counting


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  return tiny_run.write_store(tmp_path_factory.mktemp('data') / 'store')


def steps(program, data, count=2):
  """Returns the state after some steps, and the nats of each step."""
  lanes = Lanes(data.documents('train'), program.rows, program.segment, seed=0)
  state, nats = program.create(1), []
  for _ in range(count):
    batch, _ = next(lanes)
    state, sums = program.train_step(state, program.put(batch, program.rows))
    nats.append(float(sums.nats))
  return state, nats


def test_the_state_is_donated_and_keeps_shapes_and_shardings(data):
  program = tiny_run.program()
  state = program.create(1)
  facts = lambda a: (a.shape, a.dtype, a.sharding)
  wanted = jax.tree.map(facts, program.shapes)
  assert jax.tree.map(facts, state) == wanted
  lanes = Lanes(data.documents('train'), program.rows, program.segment, seed=0)
  batch, _ = next(lanes)
  after, _ = program.train_step(state, program.put(batch, program.rows))
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.carry))
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
  assert jax.tree.map(facts, after) == wanted


def test_a_seed_gives_the_same_state():
  program = tiny_run.program()
  assert digest(program.create(1)) == digest(program.create(1))
  assert digest(program.create(1).params) != digest(program.create(2).params)
  assert digest(program.create(2**32 - 1)) != digest(program.create(2**31 - 1))


def test_an_empty_carry_is_zeros():
  program = tiny_run.program()
  params = program.create(1).params
  carry = program.empty_carry(params, 6)
  assert {leaf.shape[0] for leaf in jax.tree.leaves(carry)} == {6}
  assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(carry))


def test_rows_must_divide_over_the_devices():
  program = tiny_run.program(8, rows=12)
  with pytest.raises(ValueError, match='12'):
    _ = program.shapes


@pytest.mark.parametrize('shape', [(1, 1, 1), (8, 1, 1), (8, 2, 2)])
def test_sown_metrics_count_all_rows_on_every_device(data, shape):
  """In training, and in evaluation."""
  program = tiny_run.program(*shape, rows=8)
  model = program.model.clone(cell=Counting())
  program = dataclasses.replace(program, model=model)
  lanes = Lanes(data.documents('train'), 8, program.segment, seed=0)
  batch, _ = next(lanes)
  depth_BT = batch.mask_BT * (1 + np.arange(program.segment))
  put = program.put(batch, 8)
  state = program.create(1)
  _, evaluated, _ = program.eval_step(
    state.params, program.empty_carry(state.params, 8), put
  )
  _, trained = program.train_step(state, put)
  for sums in evaluated, trained:
    assert all(a.is_fully_replicated for a in jax.tree.leaves(sums.sown))
    mean, peak = sums.sown['halting_depth'], sums.sown['halting_depth_max']
    assert (mean.total, mean.count) == (depth_BT.sum(), batch.mask_BT.sum())
    assert peak.value == depth_BT.max()


@pytest.mark.slow
@pytest.mark.parametrize('shape', [(8, 1, 1), (8, 2, 2)])
def test_a_sharded_run_equals_one_on_one_device(data, shape):
  """Two steps, including optimizer and average."""
  state, nats = steps(tiny_run.program(rows=8), data)
  cut, cut_nats = steps(tiny_run.program(*shape), data)
  np.testing.assert_allclose(cut_nats, nats, rtol=1e-5)
  # Adam's initial updates are signs of gradients, even of those near 0.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3),
    jax.device_get(cut.carry),
    jax.device_get(state.carry),
  )
