"""Writes the checkpoints of training steps in the background.

orbax's manager does the work. This module writes the manifest of a step before
the step is committed, and decides which steps are kept. A failed save does not
end the run, and it does not affect the next save. There is one exception: if a
save cannot even begin on one of several hosts, the run ends.

On a disk, a rename commits a step: a folder with the final name is complete.
In a bucket, which cannot rename, a step is written in place and its last file
commits it.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import logging as standard_logging
import shutil
from typing import Any

from absl import logging
from etils import epath
import jax
import orbax.checkpoint as ocp

from meliad_rec.distributed import hosts
from meliad_rec.storage import checksums
from meliad_rec.storage.saved_step import CheckpointError
from meliad_rec.storage.saved_step import first_line
from meliad_rec.storage.workdir import in_bucket

_UNFINISHED = '.orbax-checkpoint-tmp'  # Ends the name of a step being written.


def committed_steps(directory: epath.Path) -> dict[int, epath.Path]:
  """Returns {step: folder} of all committed steps, oldest first.

  Args:
    directory: epath.Path of the folder of all steps; it need not exist.
  """
  # `exists` raises for a bucket that cannot be read; `is_dir` returns False.
  if not (directory.exists() and directory.is_dir()):
    return {}
  found = {
    int(path.name): path
    for path in directory.iterdir()
    if path.name.isdecimal() and ocp.utils.is_checkpoint_finalized(path)
  }
  return dict(sorted(found.items()))


class SaveError(CheckpointError):
  """The error raised if a step could not be saved.

  Its cause may be temporary. If the run is started again, it resumes from the
  last step that was saved.
  """

  exit_code = 1
  logged = False  # Whether the message has been logged.


class StepWriter:
  """A writer that saves steps to a directory and deletes steps not to be kept.

  Args:
    directory: epath.Path; created by the first save.
    keep: number of last steps to keep, in addition to the best one.
  """

  def __init__(self, directory: epath.Path, keep: int):
    self._directory = directory
    self._keep = _Keep(keep, {})
    self._manager: ocp.CheckpointManager | None = None
    self._step: int | None = None  # The step that was saved last.
    self._failure: SaveError | None = None
    logging.get_absl_logger().addFilter(_without_orbax_info)

  def save(
    self,
    step: int,
    args: ocp.args.Composite,
    scores: Mapping[int, float | None],
  ) -> None:
    """Waits for the previous save, and starts to save a step in the background.

    If the save cannot begin, this is logged as an error. On several hosts the
    error is also raised, because the other hosts would wait for this one.

    Args:
      step: number of the step, greater than all in the directory.
      args: from saved_step.save_args.
      scores: {step: value or None} of all steps; the step with the lowest value
        is kept.

    Raises:
      SaveError: on several hosts, if the save cannot begin.
    """
    self.finish()
    if self._manager is None:
      self.remove_leftovers()
    # If one host has lost its manager, all make a new one: managers wait for
    # each other.
    if hosts.any_of(self._manager is None):
      self._close_manager()
    self._step, self._failure = step, None
    self._keep.scores = scores
    # orbax and tensorstore raise errors of many classes. None of them should
    # end a run whose state in memory is good.
    try:
      self.check_space(args['state'].item)
      self._open().save(step, args=args, force=True)
    except Exception as error:
      self._fail(error)
      if jax.process_count() > 1:
        raise self._failure from error

  def remove_leftovers(self) -> None:
    """Removes what killed and failed saves left on the disk; none may run.

    Process 0 does this. orbax would do it too, but only after the space on the
    disk has been checked.
    """
    if in_bucket(self._directory) or jax.process_index() > 0:
      return
    for path in self._directory.glob(f'*{_UNFINISHED}'):
      shutil.rmtree(path, ignore_errors=True)

  def check_space(self, state: Any) -> None:
    """Raises OSError if a step certainly does not fit on the disk.

    Without this check, orbax would print a traceback for each array. Nothing is
    checked in a bucket.

    Args:
      state: pytree of arrays, or of their jax.ShapeDtypeStruct.
    """
    if in_bucket(self._directory):
      return
    there = next(f for f in self._directory.parents if f.exists())
    leaves = jax.tree.leaves(state)
    needed = sum(a.size * a.dtype.itemsize for a in leaves)
    if needed > (free := shutil.disk_usage(there).free):
      raise OSError(f'{needed:,} bytes do not fit into the {free:,} left')

  def finish(self) -> None:
    """Blocks until the current save has been committed or has failed."""
    if self._manager is not None:
      try:
        self._manager.wait_until_finished()
      except Exception as error:
        self._fail(error)

  def wait(self) -> None:
    """Blocks until the last save has been committed or has failed.

    A failure is raised only once: a second call does not raise it again.

    Raises:
      SaveError: the last save failed.
    """
    self.finish()
    failure, self._failure = self._failure, None
    if failure is not None:
      raise failure

  def close(self) -> None:
    """Waits for the last save and ends orbax's threads.

    Raises:
      SaveError: the last save failed.
    """
    self.finish()
    self._close_manager()
    self.wait()

  def _open(self) -> ocp.CheckpointManager:
    """Returns orbax's manager; creates it if there is none."""
    if self._manager is None:
      self._manager = _Manager(
        self._directory,
        options=ocp.CheckpointManagerOptions(
          preservation_policy=self._keep,
          cleanup_tmp_directories=True,
          lightweight_initialize=True,
          async_options=ocp.options.AsyncOptions(
            post_finalization_callback=self._write_manifest,
            # In the background, a folder that cannot be created would only be
            # reported after a timeout of minutes.
            create_directories_asynchronously=False,
          ),
        ),
      )
    return self._manager

  def _close_manager(self) -> None:
    if self._manager is not None:
      self._manager.close()
      self._manager = None

  def _write_manifest(self) -> None:
    # orbax calls this just before the commit, when the step is complete in its
    # temporary folder or, in a bucket, in its final one.
    folder = self._directory / f'{self._step}{_UNFINISHED}'
    final = self._directory / str(self._step)
    checksums.write(folder if folder.exists() else final)

  def _fail(self, error: Exception) -> None:
    self._failure = SaveError(
      f'Step {self._step} was not saved in {self._directory}'
      f' ({first_line(error)}). Check that this folder can be written and that'
      ' its disk has space.'
    )
    logging.error('%s', self._failure)
    self._failure.logged = True
    # The manager's state after a failed save would make the next one fail too.
    self._manager = None


class _Manager(ocp.CheckpointManager):
  """A manager of orbax that does not ask jax whether the run should stop.

  On several hosts, these questions to jax are numbered, so that all hosts stop
  at the same one. preemption.py asks and numbers them. If orbax asked too, it
  would use numbers of its own, which do not fit into this sequence.
  """

  def reached_preemption(self, step: int) -> bool:
    del step
    return False


@dataclasses.dataclass
class _Keep:
  """A preservation policy of orbax: keeps the last steps and the best one.

  Attributes:
    last: number of last steps to keep.
    scores: {step: value or None}; the newest step with the lowest value
      is the best.
  """

  last: int
  scores: Mapping[int, float | None]

  def should_preserve(
    self, checkpoints: Sequence[Any], *, context: Any
  ) -> list[bool]:
    del context
    steps = [info.step for info in checkpoints]
    scored = [step for step in steps if self.scores.get(step) is not None]
    order = lambda step: (self.scores[step], -step)  # The newest of equal ones.
    best = min(scored, key=order, default=None)
    return [step in steps[-self.last :] or step == best for step in steps]


def _without_orbax_info(record: standard_logging.LogRecord) -> bool:
  """Filters log records: returns False for records of orbax up to level INFO.

  Warnings and errors of orbax pass, as do all records of other packages.
  """
  info = record.levelno <= standard_logging.INFO
  return not (info and 'orbax' in record.pathname)
