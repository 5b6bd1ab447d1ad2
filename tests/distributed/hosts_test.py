"""What a process needs before it computes: mesh, agreement, compiled programs.

main_test.py has two real hosts that disagree.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.distributed import compilation_cache
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


def test_hosts_that_agree(monkeypatch):
  hosts.agree({'data': 'a'})  # One host alone.
  assert hosts.any_of(True)
  assert not hosts.any_of(False)
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
  two(monkeypatch, np.logical_not)
  assert hosts.any_of(False)


def test_code_of_hosts(monkeypatch):
  assert hosts.code() == ''
  two(monkeypatch, lambda mine: mine)
  found = hosts.code()
  assert hosts.code() == found
  read = pathlib.Path.read_bytes
  monkeypatch.setattr(
    pathlib.Path, 'read_bytes', lambda file: read(file) + b'#'
  )
  assert hosts.code() != found
  monkeypatch.undo()
  two(monkeypatch, lambda mine: mine)
  monkeypatch.setattr(jax, '__version__', '0')
  assert hosts.code() != found


def test_tracing_knows_the_mesh():
  mesh, seen = make_mesh(2, 2, 2), []

  def double(x):
    seen.append(dict(jax.sharding.get_abstract_mesh().shape))
    return 2 * x

  assert mesh_jit(mesh, double)(jnp.ones(3)).tolist() == [2, 2, 2]
  assert mesh_jit(None, double)(jnp.ones(5)).tolist() == [2] * 5
  assert seen == [dict(mesh.shape), {}]


@pytest.fixture
def cached(monkeypatch):
  """Returns what is cached where, given the user's cache folder."""
  before = jax.config.jax_compilation_cache_dir

  def enable(home, given=None):
    monkeypatch.setenv('XDG_CACHE_HOME', str(home))
    jax.config.update('jax_compilation_cache_dir', given)
    compilation_cache.enable()
    return jax.config.jax_compilation_cache_dir

  yield enable
  jax.config.update('jax_compilation_cache_dir', before)


def test_compiled_programs_are_in_the_users_own_folder(cached, tmp_path):
  path = pathlib.Path(cached(tmp_path))
  assert path.parent == tmp_path / 'meliad_rec'
  assert path.stat().st_mode & 0o777 == 0o700
  # The variable JAX_COMPILATION_CACHE_DIR wins.
  mine = str(tmp_path / 'mine')
  assert cached(tmp_path / 'other', mine) == mine
  assert not (tmp_path / 'other').exists()


def test_a_folder_that_cannot_be_written_is_not_used(cached, tmp_path, caplog):
  (tmp_path / 'file').write_text('')
  with caplog.at_level('INFO'):
    assert cached(tmp_path / 'file') is None
  assert 'JAX_COMPILATION_CACHE_DIR' in caplog.text
