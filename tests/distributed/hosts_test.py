"""Hosts that must agree (main_test.py has two real ones), and mesh_jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.distributed import hosts
from meliad_rec.distributed.hosts import mesh_jit
from meliad_rec.distributed.partition import make_mesh


def two(monkeypatch, other):
  """Simulates a second process that holds `other(array)`."""
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(
    hosts.multihost_utils,
    'process_allgather',
    lambda mine: np.stack([mine, other(mine)]),
  )


def test_one_host_agrees_with_itself():
  hosts.agree({'data': 'a'})
  assert hosts.any_of(True)
  assert not hosts.any_of(False)


def test_hosts_that_agree(monkeypatch):
  two(monkeypatch, lambda mine: mine)
  hosts.agree({'data': 'a', 'step': 'None'})
  assert not hosts.any_of(False)


def test_hosts_that_differ(monkeypatch):
  def other(mine):
    changed = mine.copy()
    changed[1, 5] += 1
    return changed

  two(monkeypatch, other)
  with pytest.raises(ValueError, match='validation: process 1'):
    hosts.agree({'data': 'a', 'validation': 'b', 'step': '3'})


def test_a_flag_on_the_other_host(monkeypatch):
  two(monkeypatch, np.logical_not)
  assert hosts.any_of(False)


def test_tracing_knows_the_mesh():
  mesh, seen = make_mesh(2, 2, 2), []

  def double(x):
    seen.append(dict(jax.sharding.get_abstract_mesh().shape))
    return 2 * x

  assert mesh_jit(mesh, double)(jnp.ones(3)).tolist() == [2, 2, 2]
  assert mesh_jit(None, double)(jnp.ones(5)).tolist() == [2] * 5
  assert seen == [dict(mesh.shape), {}]
