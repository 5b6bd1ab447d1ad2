"""Checkpoints of a run: saved while it goes on, verified before trusted.

Which step is best: by one metric, on one set of validation documents.
"""

import math

from absl import logging
from etils import epath

from meliad_rec.distributed.preemption import StopRequest
from meliad_rec.storage import saved_step
from meliad_rec.storage import step_writer
from meliad_rec.storage.saved_step import CheckpointError
from meliad_rec.storage.saved_step import DamagedError
from meliad_rec.storage.saved_step import SavedStep
from meliad_rec.storage.step_writer import StepWriter
from meliad_rec.storage.workdir import in_bucket


class Best:
  """How steps are judged.

  Args:
    metric: name of the figure; None: of whatever figure the steps have.
    best_is: 'lowest' or 'highest'.
  """

  def __init__(self, metric, best_is):
    if best_is not in ('lowest', 'highest'):
      raise ValueError(f'best_is is {best_is!r}; set lowest or highest.')
    self.metric = metric
    self._sign = 1 if best_is == 'lowest' else -1

  def score(self, metrics):
    """[metric, value of which lower is better], or None.

    Args:
      metrics: {name: float} of a step; None: it was not evaluated.
    """
    if self.metric is None or metrics is None:
      return None
    if self.metric not in metrics:
      raise ValueError(
        f'best_metric is {self.metric!r}, and the metrics are'
        f' {sorted(metrics)}; set best_metric to one of them.'
      )
    value = self._sign * float(metrics[self.metric])
    return [self.metric, value] if math.isfinite(value) else None


def comparable(scores):
  """{step: value}; None where it was judged on other data than the newest.

  Args:
    scores: {step: (value, validation data) or None}, oldest first.
  """
  data = [score[1] for score in scores.values() if score is not None]
  return {
    step: score[0] if score is not None and score[1] == data[-1] else None
    for step, score in scores.items()
  }


class Checkpoints:
  """The steps saved in one directory, on a disk or in a bucket.

  Making this object changes nothing on disk; readers may use it beside the
  run that trains.

  Args:
    directory: path; made by the first save.
    keep: steps kept besides the best.
    best_metric: name in the `metrics` of `save` by which one step is best,
      among those whose `meta` has the same 'validation' as the newest.
    best_is: 'lowest' or 'highest'.
  """

  def __init__(self, directory, keep=3, best_metric=None, best_is='lowest'):
    if keep < 1:
      raise ValueError(f'keep is {keep}, and must be 1 or more; set keep.')
    self._best = Best(best_metric, best_is)
    # orbax takes absolute paths only, as addresses are.
    path = epath.Path(directory)
    self.directory = path if in_bucket(path) else path.absolute()
    self._stop = StopRequest()
    self._writer = StepWriter(self.directory, keep)

  def save(self, step, state, data, meta, metrics=None):
    """Starts saving; returns as soon as `state` may be donated.

    A save that fails is an error line, and training can go on; `wait` raises
    if the last one failed.

    Args:
      step: later than every step in the directory; the newest again where it
        was saved before it was evaluated.
      state: pytree of arrays.
      data: JSON-able position of the data.
      meta: JSON-able facts about the run: tokenizer, data, model.
      metrics: {name: float} of this state, among them `best_metric`.

    Returns:
      False if this very state is there already, with a score if it has one.

    Raises:
      CheckpointError: the directory is ahead of `step`; or see StepWriter.save.
    """
    leaves = saved_step.table(state)
    self._writer.finish()
    score, newest = self._best.score(metrics), self.latest()
    again = step == newest and self._at(step).meta()['leaves'] == leaves
    if again and (score is None or self._at(step).score(score[0])):
      return False
    if not again and newest is not None and step <= newest:
      raise CheckpointError(
        f'{self.directory} already holds step {newest}, so step {step} cannot'
        ' be saved there; restore the newest step or choose another workdir.'
      )
    items = saved_step.items(state, leaves, data, meta, metrics or {}, score)
    scores = self._found_scores() | {
      step: score and (score[1], meta.get('validation'))
    }
    self._writer.save(step, items, comparable(scores))
    return True

  def wait(self):
    """Blocks until the last save is committed; CheckpointError if it failed."""
    self._writer.wait()

  def close(self):
    """Waits, as `wait` does, and gives the signals back."""
    # A signal given back earlier would end the process within the last save.
    try:
      self._writer.close()
    finally:
      self._stop.close()

  def preempted(self):
    """True if the run was asked to stop: save, wait and leave.

    Listens to signals from its first call to `close`; see StopRequest.reached.
    """
    return self._stop.reached()

  @property
  def exit_code(self):
    """What the process should exit with: 0 unless it was asked to stop."""
    return self._stop.exit_code

  def steps(self):
    """Steps in the directory, oldest first."""
    return list(step_writer.folders(self.directory))

  def latest(self):
    """The newest step, or None."""
    return max(self.steps(), default=None)

  def restore(self, target, step=None, match=None):
    """The newest step that verifies.

    A damaged step is named in an error line and renamed to STEP.corrupt, and
    the step before it is used.

    Args:
      target: the state, or its jax.ShapeDtypeStruct with shardings; without
        a sharding, the first device.
      step: this step and no other, or 'best'.
      match: {key of meta: value} that must be the same, such as tokenizer.

    Returns:
      (step, state, data, meta).

    Raises:
      CheckpointError: nothing there verifies, or it is not `target`.
    """
    # Its list of steps ends where one is put aside.
    self._writer.close()
    step_writer.settle(self.directory)
    found, damaged = self._first_good(target, step, match, part='')
    for each in damaged:
      self._at(each).put_aside()
    return found

  def restore_params(self, target, step=None, match=None, part='params'):
    """The parameters alone (part 'params') or their average ('ema').

    Arguments and errors as in `restore`; nothing on disk is changed.

    Returns:
      (step, parameters, meta).
    """
    found, _ = self._first_good(target, step, match, part=f'{part}/')
    step, params, _, meta = found
    return step, params, meta

  def _first_good(self, target, step, match, part):
    """((step, tree, data, meta), damaged steps passed over)."""
    damaged = {}
    for each in self._candidates(step):
      try:
        loaded = self._at(each).load(target, match or {}, part)
      except DamagedError as error:
        logging.error('%s', error)
        damaged[each] = error
        continue
      if damaged:
        logging.error('Using step %d in place of %s.', each, list(damaged))
      return (each, *loaded), list(damaged)
    reasons = ' '.join(map(str, damaged.values())) or 'there is none.'
    raise CheckpointError(
      f'{self.directory} holds no step that can be used: {reasons} Choose'
      ' another workdir.'
    )

  def _candidates(self, step):
    """Steps to try, in order."""
    steps = self.steps()[::-1]
    if step is None:
      return steps
    if step == 'best':
      scores = self._scores()
      judged = [s for s in steps if scores[s] is not None]
      if steps and not judged:
        raise CheckpointError(
          f'{self.directory} has no best step: no evaluation has been saved'
          ' yet; leave out the step for the newest.'
        )
      return sorted(judged, key=scores.get)
    if step not in steps:
      raise CheckpointError(
        f'{self.directory} has no step {step}, but {steps[::-1]}; give one of'
        ' these.'
      )
    return [step]

  def _scores(self):
    return comparable(self._found_scores())

  def _found_scores(self):
    found = step_writer.folders(self.directory)
    metric = self._best.metric
    return {step: SavedStep(each).score(metric) for step, each in found.items()}

  def _at(self, step):
    return SavedStep(step_writer.folders(self.directory)[step])
