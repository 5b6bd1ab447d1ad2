"""Hosts that differ are refused, by name; main_test.py has two real ones."""

import jax
import numpy as np
import pytest

from meliad_rec.distributed import hosts


def two(monkeypatch, other):
  """As if a second process held `other(array)` where this one has an array."""
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
  with pytest.raises(ValueError, match='differ in validation: process 1 has'):
    hosts.agree({'data': 'a', 'validation': 'b', 'step': '3'})


def test_a_flag_on_the_other_host(monkeypatch):
  two(monkeypatch, np.logical_not)
  assert hosts.any_of(False)
