"""Agreement between the hosts of a run, and jit on a mesh."""

from collections.abc import Callable
import functools
import hashlib
from pathlib import Path

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
import numpy as np


def any_of(flag: bool) -> bool:
  """Returns whether the flag is set on any host; every host must call this."""
  if jax.process_count() == 1:
    return flag
  return bool(multihost_utils.process_allgather(np.array(flag)).any())


def agree(facts: dict[str, str]) -> None:
  """Checks that all hosts have the same facts; every host must call this.

  Args:
    facts: texts by name, such as the hash of the data; every host gives the
      same names in the same order.

  Raises:
    ValueError: on all hosts, if a fact differs between hosts.
  """
  if jax.process_count() == 1:
    return
  hashes = [hashlib.sha256(value.encode()).digest() for value in facts.values()]
  mine = np.frombuffer(b''.join(hashes), np.uint8).reshape(len(facts), -1)
  by_host = multihost_utils.process_allgather(mine)
  differs = (by_host != by_host[0]).any(axis=-1)
  if not differs.any():
    return
  names = [list(facts)[i] for i in np.flatnonzero(differs.any(axis=0))]
  others = [str(host) for host in np.flatnonzero(differs.any(axis=1))]
  raise ValueError(
    f'The hosts differ in {", ".join(names)}: process {", ".join(others)} has'
    ' different values than process 0. Give all hosts the same code, data,'
    ' settings and --workdir.'
  )


def code() -> str:
  """Returns a text that is the same on hosts with the same jax and package.

  It is empty for a process without others, which has nothing to compare.
  """
  if jax.process_count() == 1:
    return ''
  package = Path(__file__).parents[1]
  contents = hashlib.sha256()
  for file in sorted(package.rglob('*.py')):
    contents.update(f'{file.relative_to(package)}\0'.encode())
    contents.update(file.read_bytes())
  return f'jax {jax.__version__}, meliad_rec {contents.hexdigest()}'


def mesh_jit(mesh: Mesh | None, function: Callable, **options) -> Callable:
  """Returns jax.jit(function), with the mesh set during calls.

  While a function is traced, it cannot read the mesh from its sharded
  arguments, but Pallas kernels need the mesh (see per_shard.py).

  Args:
    mesh: mesh of the arguments; None returns plain jax.jit(function).
    function: function to compile; it takes positional arguments only.
    **options: options of jax.jit.
  """
  jitted = jax.jit(function, **options)
  if mesh is None:
    return jitted

  @functools.wraps(function)
  def call(*arguments):
    with jax.set_mesh(mesh):
      return jitted(*arguments)

  return call
