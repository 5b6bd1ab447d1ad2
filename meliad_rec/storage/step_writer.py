"""Writes steps behind the training: asynchronous, committed by a rename.

orbax's manager does the work. Added: the manifest, written before the commit;
a failed save that neither ends the run nor spoils the next one, unless it could
not begin on one of several hosts; and which steps stay.

A step saved again: STEP.old stays until the new STEP is committed.

On a disk one of the two is whole at every instant, whatever is killed when. In
a bucket, where a step is written in its place and its last file commits it, a
rename copies file by file: killed within one, the step before it is used.
"""

import dataclasses
import logging as standard_logging

from absl import logging
import jax
from jax.experimental import multihost_utils
import orbax.checkpoint as ocp

from meliad_rec.distributed import hosts
from meliad_rec.storage import checksums
from meliad_rec.storage.saved_step import CheckpointError
from meliad_rec.storage.saved_step import first_line

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


class SaveError(CheckpointError):
  """A step was not saved: what failed may pass, and the run goes on from the
  step before it when it is started again."""

  exit_code = 1


class StepWriter:
  """Saves steps to `directory` and deletes those no longer kept.

  Args:
    directory: epath.Path; made by the first save.
    keep: how many of the last steps stay.
  """

  def __init__(self, directory, keep):
    self._directory = directory
    self._keep = keep
    self._manager = None
    self._saving = None
    self._replaces = False
    self._failure = None
    logging.get_absl_logger().addFilter(_without_orbax_info)

  def save(self, step, items, scores):
    """Starts a save; one that cannot begin is an error line.

    On several hosts it is an error: the others wait for this one, within what
    it has left.

    Args:
      step: none before the last in the directory; the last is replaced.
      items: what orbax is to write.
      scores: {step: value or None} of all steps; the lowest stays.

    Raises:
      SaveError: on several hosts.
    """
    self.finish()
    # A manager that one host has lost all make anew: they wait for each other.
    if hosts.any_of(self._manager is None):
      self._close_manager()
    self._saving, self._failure = step, None
    # orbax and tensorstore raise errors of many classes, and none of them
    # should end a run whose state in memory is good.
    try:
      manager = self._open(step)
      self._policy.scores = scores
      manager.save(step, args=items, force=True)
    except Exception as error:
      self._fail(error)
      if jax.process_count() > 1:
        raise self._failure from error

  def finish(self):
    """Blocks until the save under way has been committed or has failed."""
    if self._manager is not None:
      try:
        self._manager.wait_until_finished()
        if self._replaces:
          self._replaces = False
          settle(self._directory)
      except Exception as error:
        self._fail(error)

  def wait(self):
    """Blocks as `finish`; SaveError if the last save failed."""
    self.finish()
    failure, self._failure = self._failure, None
    if failure is not None:
      raise failure

  def close(self):
    """Ends orbax's threads; SaveError if the last save failed."""
    self.finish()
    self._close_manager()
    self.wait()

  def _open(self, step):
    self._replaces = step in folders(self._directory)
    if self._replaces:
      # orbax reads once which steps there are.
      self._close_manager()
    if self._manager is None:
      settle(self._directory)
      if self._replaces:
        set_aside(self._directory / str(step))
      self._policy = _Keep(self._keep, {})
      self._manager = _Manager(
        self._directory,
        options=ocp.CheckpointManagerOptions(
          preservation_policy=self._policy,
          cleanup_tmp_directories=True,
          lightweight_initialize=True,
          async_options=ocp.options.AsyncOptions(
            post_finalization_callback=self._write_manifest,
            # Made behind, a folder that cannot be made is found out by a
            # timeout of minutes.
            create_directories_asynchronously=False,
          ),
        ),
      )
    return self._manager

  def _close_manager(self):
    if self._manager is not None:
      self._manager.close()
      self._manager = None

  def _write_manifest(self):
    # orbax calls this last before the commit, when the step is whole in its
    # temporary folder, or (gs://, which cannot rename) in its final one.
    folder = self._directory / f'{self._saving}.orbax-checkpoint-tmp'
    final = self._directory / str(self._saving)
    checksums.write(folder if folder.exists() else final)

  def _fail(self, error):
    self._failure = SaveError(
      f'Step {self._saving} was not saved in {self._directory}'
      f' ({first_line(error)}); see that it can be written and has room.'
    )
    logging.error('%s', self._failure)
    # What orbax holds of the failed save would make the next one fail too.
    self._manager = None


class _Manager(ocp.CheckpointManager):
  """orbax's, but that it does not ask, by steps, whether the run shall stop.

  Hosts agree on a stop by counting questions, and preemption.py asks them.
  """

  def reached_preemption(self, step):
    del step
    return False


@dataclasses.dataclass
class _Keep:
  """orbax's preservation policy: the last steps and the best."""

  last: int
  scores: dict

  def should_preserve(self, checkpoints, *, context):
    del context
    steps = [info.step for info in checkpoints]
    scored = [step for step in steps if self.scores.get(step) is not None]
    best = min(scored, key=self.scores.get, default=None)
    return [step in steps[-self.last :] or step == best for step in steps]


def _without_orbax_info(record):
  """Drops orbax's account of every save; its warnings and errors stay."""
  info = record.levelno <= standard_logging.INFO
  return not (info and 'orbax' in record.pathname)
