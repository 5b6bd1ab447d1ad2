"""Checkpoints of a run: saved during training, verified when restored.

  checkpoints/
    20/          one step: state, data, meta, MANIFEST.json (saved_step.py)
    30/
    scores.json  scores of steps that were evaluated after they were saved
    10.corrupt/  a damaged step that `restore` skipped

`save` computes a fingerprint of every array, and orbax writes the step in the
background (step_writer.py). `restore` reads the newest step and verifies all
of its bytes and arrays. If this step is damaged, `restore` logs a warning and
tries the step before it. The best step has the best value of one metric on one
set of validation documents.
"""

from collections.abc import Mapping
import math
import os
from typing import Any

from absl import logging
from etils import epath
from jax.experimental import multihost_utils

from meliad_rec.distributed.preemption import StopRequest
from meliad_rec.storage import saved_step
from meliad_rec.storage.saved_step import CheckpointError
from meliad_rec.storage.saved_step import DamagedError
from meliad_rec.storage.saved_step import SavedStep
from meliad_rec.storage.saved_step import Score
from meliad_rec.storage.step_writer import committed_steps
from meliad_rec.storage.step_writer import StepWriter
from meliad_rec.storage.workdir import in_bucket

_DELETED = 20  # A read fails if more steps than this are deleted during it.


class Checkpoints:
  """The steps saved in one directory, on a disk or in a bucket.

  Creating this object changes nothing on disk. Other processes may read the
  directory while a run trains.

  Args:
    directory: path; created by the first save.
    keep: number of last steps to keep, in addition to the best one.
    best_metric: name of the metric, among the `metrics` of `save`, that decides
      which step is best. Steps are compared only if they were evaluated on the
      same validation data as the newest step that has this metric; the entry
      'validation' of `meta` identifies these data. None: `save` records no
      score, and saved steps are compared by the metric of the newest step that
      has a score.
    best_is: 'lowest' or 'highest'.

  Raises:
    ValueError: keep is below 1, or best_is is unknown.
  """

  def __init__(
    self,
    directory: str | os.PathLike,
    keep: int = 3,
    best_metric: str | None = None,
    best_is: str = 'lowest',
  ):
    if keep < 1:
      raise ValueError(f'keep must be at least 1, got {keep}.')
    self._best = Best(best_metric, best_is)
    # orbax needs an absolute path. The address of a bucket is one.
    path = epath.Path(directory)
    self.directory = path if in_bucket(path) else path.absolute()
    self._stop = StopRequest()
    self._writer = StepWriter(self.directory, keep)

  def save(
    self,
    step: int,
    state: Any,
    data: Any,
    meta: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
  ) -> bool:
    """Starts a save; returns as soon as `state` may be donated or changed.

    If the save fails, this is logged as an error, and training can continue.
    `wait` raises the error of the last save.

    A step may be saved without metrics first, and again with metrics after it
    has been evaluated. The second save adds only its score and its `data`.

    Args:
      step: number of the step. It must be greater than all in the directory,
        except that the newest step may be saved again with the same state.
      state: pytree of arrays.
      data: the run's position in the data and its progress, as JSON values.
      meta: facts about the run, as JSON values: tokenizer, data, model.
      metrics: {name: float} of this state, including `best_metric`. None: the
        state was not evaluated.

    Returns:
      Whether there was something to save. False means that this state is
      already saved, and that there is no new score.

    Raises:
      CheckpointError: the directory holds this step with another state, or a
        later step; or, on several hosts, the save cannot begin.
      ValueError: `metrics` lacks `best_metric`.
    """
    leaves = saved_step.leaf_table(state)
    self._writer.finish()
    score, newest = self._best.score(metrics), self.latest()
    if step == newest and self._at(step).meta()['leaves'] == leaves:
      if score is None or self._at(step).score(score[0]):
        return False
      self._at(step).add_score(score, meta.get('validation'), data)
      return True
    if newest is not None and step <= newest:
      raise CheckpointError(
        f'{self.directory} already holds step {newest}, so step {step} cannot'
        ' be saved there. Restore the newest step, or give another --workdir.'
      )
    args = saved_step.save_args(
      step, state, leaves, data, meta, metrics or {}, score
    )
    scores = self._scores() | {
      step: score and (score[1], score[0], meta.get('validation'))
    }
    self._writer.save(step, args, comparable(scores))
    return True

  def check_space(self, state: Any) -> None:
    """Checks, before training, that a step fits on the disk.

    Removes what a killed save left there. Every host must call this, and no
    other run may use the directory.

    Args:
      state: pytree of the arrays to save, or of their jax.ShapeDtypeStruct.

    Raises:
      CheckpointError: the step certainly does not fit.
    """
    self._writer.remove_leftovers()
    multihost_utils.sync_global_devices(f'{self.directory} has no leftovers')
    try:
      self._writer.check_space(state)
    except OSError as error:
      raise CheckpointError(
        'Training did not start, because a checkpoint would not fit in '
        f'{self.directory}: {error}. Free space on that disk, or give another '
        '--workdir.'
      ) from error

  def wait(self) -> None:
    """Blocks until the last save ends.

    Raises:
      SaveError: the last save failed.
    """
    self._writer.wait()

  def close(self) -> None:
    """Blocks until the last save ends, and stops catching signals.

    The signal handlers that `preempted` replaced are restored in any case.

    Raises:
      SaveError: the last save failed.
    """
    # If the handlers were restored before, a signal could end the process
    # during the last save.
    try:
      self._writer.close()
    finally:
      self._stop.close()

  def preempted(self) -> bool:
    """Returns whether the run was asked to stop, and so should save and exit.

    From the first call until `close`, signals such as SIGTERM are caught. See
    StopRequest.reached.
    """
    return self._stop.reached()

  @property
  def exit_code(self) -> int:
    """Exit code of the process; see StopRequest.exit_code."""
    return self._stop.exit_code

  def steps(self) -> list[int]:
    """Returns the numbers of the complete steps, in ascending order."""
    return list(committed_steps(self.directory))

  def latest(self) -> int | None:
    """Returns the number of the newest step; None if there is no step."""
    return max(self.steps(), default=None)

  def restore(
    self,
    target: Any,
    step: int | str | None = None,
    match: Mapping[str, Any] | None = None,
  ) -> tuple[int, Any, Any, dict[str, Any]]:
    """Restores the newest step that can be verified.

    If a damaged step is skipped and another one is restored, the damaged step
    is logged as a warning and renamed to STEP.corrupt.

    Args:
      target: pytree of the arrays to restore, or of their jax.ShapeDtypeStruct
        with shardings. A leaf without a sharding is put on the first device.
      step: number of the only step to try. 'best': the steps with a score are
        tried, best first. None: all steps are tried, newest first.
      match: {name: value} that the saved facts about the run must contain, such
        as the tokenizer.

    Returns:
      (number of the step, state, data, facts about the run). The last three are
      `state`, `data` and `meta` as they were last given to `save`.

    Raises:
      CheckpointError: there is no such step, none can be verified, or the step
        differs from `target` or `match`.
    """
    self._writer.close()  # orbax does not notice a renamed step.
    found, damaged = self._first_good(target, step, match, part='')
    for each in damaged:
      self._at(each).put_aside()
    return found

  def restore_params(
    self,
    target: Any,
    step: int | str | None = None,
    match: Mapping[str, Any] | None = None,
    part: str = 'params',
  ) -> tuple[int, Any, dict[str, Any]]:
    """Restores only the parameters, or their moving average.

    Nothing on disk is changed. Errors are as in `restore`.

    Args:
      target: the parameters, as in `restore`; or a function that chooses
        parameters, see SavedStep.load.
      step: as in `restore`.
      match: as in `restore`.
      part: 'params' for the parameters, 'ema' for their moving average.

    Returns:
      (number of the step, parameters, facts about the run).
    """
    found, _ = self._first_good(target, step, match, part=f'{part}/')
    step, params, _, meta = found
    return step, params, meta

  def _first_good(
    self,
    target: Any,
    step: int | str | None,
    match: Mapping[str, Any] | None,
    part: str,
  ) -> tuple[tuple[int, Any, Any, dict[str, Any]], list[int]]:
    """Loads the first of the `_candidates` that can be verified.

    Args:
      target, step, match: as in `restore`.
      part: as in SavedStep.load.

    Returns:
      (found, damaged). `found` is the number of the step, followed by what
      SavedStep.load returns. `damaged` lists the numbers of the damaged steps
      that were skipped.

    Raises:
      CheckpointError: as in `restore`.
    """
    damaged: dict[int, DamagedError] = {}
    deleted: set[int] = set()
    while remaining := [
      each for each in self._candidates(step) if each not in damaged
    ]:
      each = remaining[0]
      try:
        loaded = self._at(each).load(target, match or {}, part)
      except Exception as error:
        # A run that trains deletes steps as it saves newer ones.
        if each not in self.steps() and len(deleted) < _DELETED:
          deleted.add(each)
          continue
        if not isinstance(error, DamagedError):
          raise
        damaged[each] = error
        continue
      for error in damaged.values():
        logging.warning('%s', error)
      if damaged:
        logging.warning('Using step %d in place of %s.', each, list(damaged))
      return (each, *loaded), list(damaged)
    reasons = ' '.join(map(str, damaged.values()))
    if not damaged:
      message = (
        f'{self.directory} holds no checkpoint. Give the --workdir of a run'
        ' that has saved one.'
      )
    elif step is None:
      message = (
        f'{self.directory} holds no step that can be used: {reasons} Give'
        ' another --workdir.'
      )
    else:
      message = f'{reasons} Give another --step, or leave it out.'
    raise CheckpointError(message)

  def _candidates(self, step: int | str | None) -> list[int]:
    """Returns the numbers of the steps that `restore` tries, in its order.

    Args:
      step: as in `restore`.

    Raises:
      CheckpointError: there is no such step.
    """
    steps = self.steps()[::-1]
    if step is None:
      return steps
    if step == 'best':
      scores = comparable(self._scores())
      scored = [s for s in steps if scores[s] is not None]
      if steps and not scored:
        raise CheckpointError(
          f'{self.directory} has no best step: no evaluation has been saved'
          ' yet. Leave out --step to use the newest.'
        )
      return sorted(scored, key=scores.get)
    if step not in steps:
      raise CheckpointError(
        f'{self.directory} has no step {step}. Give one of {steps[::-1]}.'
      )
    return [step]

  def _scores(self) -> dict[int, tuple[float, str, str | None] | None]:
    """Returns {step: its SavedStep.score, which may be None}, oldest first."""
    metric = self._best.metric
    return {
      step: SavedStep(folder).score(metric)
      for step, folder in committed_steps(self.directory).items()
    }

  def _at(self, step: int) -> SavedStep:
    return SavedStep(self.directory / str(step))


class Best:
  """The metric by which steps are compared.

  Args:
    metric: name of the metric. None: no score is computed.
    best_is: 'lowest' or 'highest'.

  Raises:
    ValueError: best_is is unknown.
  """

  def __init__(self, metric: str | None, best_is: str):
    if best_is not in ('lowest', 'highest'):
      raise ValueError(
        f"best_is must be 'lowest' or 'highest', got {best_is!r}."
      )
    self.metric = metric
    self._sign = 1 if best_is == 'lowest' else -1

  def score(self, metrics: Mapping[str, float] | None) -> Score | None:
    """Returns the score of a step: [name of the metric, value].

    Lower values are better: if the highest value of the metric is best, the
    score has the negated value. Returns None if there is no finite value.

    Args:
      metrics: {name: float} of a step; None: the step was not evaluated.

    Raises:
      ValueError: `metrics` lacks the metric.
    """
    if self.metric is None or metrics is None:
      return None
    if self.metric not in metrics:
      raise ValueError(
        f'best_metric is {self.metric!r}, but the metrics are'
        f' {sorted(metrics)}. Set best_metric to one of them.'
      )
    value = self._sign * float(metrics[self.metric])
    return [self.metric, value] if math.isfinite(value) else None


def comparable(
  scores: Mapping[int, tuple[float, str, str | None] | None],
) -> dict[int, float | None]:
  """Keeps the scores of the same metric on the same data as the newest score.

  Args:
    scores: {step: (value, metric, identity of the validation data)}, oldest
      first; None in place of the tuple if the step has no score.

  Returns:
    {step: value}; None in place of the value if the step has no score, or one
    of another metric or on other data.
  """
  kinds = [score[1:] for score in scores.values() if score is not None]
  return {
    step: score[0] if score is not None and score[1:] == kinds[-1] else None
    for step, score in scores.items()
  }
