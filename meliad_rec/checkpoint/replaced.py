"""A step saved again: STEP.old stays until the new STEP is committed.

On a disk one of the two is whole at every instant, whatever is killed when. In
a bucket, where a step is written in its place and its last file commits it, a
rename copies file by file: killed within one, the step before it is used.
"""

import jax
from jax.experimental import multihost_utils
import orbax.checkpoint as ocp

_OLD = '.old'


def folders(directory):
  """{step: its folder}, oldest first, of what is committed; changes nothing.

  Args:
    directory: epath.Path of all steps; it need not be there.
  """
  if not _is_there(directory):
    return {}
  found = {}
  for path in sorted(directory.iterdir(), key=lambda path: path.name):
    step = path.name.removesuffix(_OLD)
    if step.isdecimal() and int(step) not in found and _is_committed(path):
      found[int(step)] = path
  return dict(sorted(found.items()))


def set_aside(folder):
  """Renames STEP to STEP.old; every host calls this, none still reads it."""
  multihost_utils.sync_global_devices(f'{folder} has been read')
  if jax.process_index() == 0:
    folder.rename(folder.parent / f'{folder.name}{_OLD}')
  multihost_utils.sync_global_devices(f'{folder} is set aside')


def settle(directory):
  """Deletes STEP.old where STEP is, and renames it back where it is not.

  Every host calls this, when no save is under way.
  """
  if jax.process_index() == 0 and _is_there(directory):
    for old in list(directory.iterdir()):
      step = old.name.removesuffix(_OLD)
      if step == old.name or not step.isdecimal():
        continue
      new = directory / step
      if new.exists() and _is_committed(new):
        old.rmtree()
        continue
      if new.exists():
        new.rmtree()
      old.rename(new)
  multihost_utils.sync_global_devices(f'{directory} is settled')


def _is_there(directory):
  # Of a bucket that cannot be asked, `is_dir` would say that there is nothing;
  # `exists` raises.
  return directory.exists() and directory.is_dir()


def _is_committed(folder):
  return ocp.utils.is_checkpoint_finalized(folder)
