"""A step saved again: STEP.old stays until the new STEP is committed.

One of the two is whole at every instant, whatever is killed when.
"""

import jax
from jax.experimental import multihost_utils

_OLD = '.old'


def folders(directory):
  """{step: its folder}, oldest first; changes nothing.

  Args:
    directory: epath.Path of all steps; it need not be there.
  """
  if not directory.is_dir():
    return {}
  names = {path.name for path in directory.iterdir()}
  found = {}
  for name in names:
    step = name.removesuffix(_OLD)
    if step.isdecimal() and (name == step or step not in names):
      found[int(step)] = directory / name
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
  if jax.process_index() == 0 and directory.is_dir():
    for old in list(directory.iterdir()):
      step = old.name.removesuffix(_OLD)
      if step == old.name or not step.isdecimal():
        continue
      if (directory / step).exists():
        old.rmtree()
      else:
        old.rename(directory / step)
  multihost_utils.sync_global_devices(f'{directory} is settled')
