"""Trains a run, from its first batch to its last checkpoint.

State, position in the data and progress are saved together, so that a run that
resumes gives the same results, bit for bit, as one that was never stopped. Step
n + 1 is dispatched to the devices before the metrics of step n are read.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
from dataclasses import asdict
from typing import Any

from absl import logging

from meliad_rec.config import config
from meliad_rec.data.batch import Batch
from meliad_rec.data.lanes import Position
from meliad_rec.data.prefetch import prefetch
from meliad_rec.distributed import hosts
from meliad_rec.distributed.preemption import at_once
from meliad_rec.evaluation.evaluation import evaluate_batch
from meliad_rec.metrics.metrics import Sums
from meliad_rec.report import journal
from meliad_rec.report.report import Report
from meliad_rec.storage.checkpoints import Checkpoints
from meliad_rec.storage.checksums import fingerprints
from meliad_rec.storage.workdir import Lock
from meliad_rec.storage.workdir import place
from meliad_rec.training import meter
from meliad_rec.training.components import build_components
from meliad_rec.training.experiment import Experiment
from meliad_rec.training.goodput import Goodput
from meliad_rec.training.profile import Profile
from meliad_rec.training.program import TrainProgram
from meliad_rec.training.progress import Progress


class Run:
  """A run on this host. Call `begin`, then `live`.

  Attributes:
    finished: whether `begin` found that nothing was left to do.

  Args:
    experiment: defines the run.
    workdir: folder that the run writes to.
    about: {name: JSON value}, facts that are saved with each checkpoint.
    fill: initial parameters -> (the parameters to begin with, a text that says
      where they are from). It is called only if the folder has no checkpoint.
      None: the run begins with the initial parameters.

  Raises:
    ValueError: workdir is not a folder on a disk or in gs://, the hosts have
      different code, data, settings or checkpoints, or the validation split
      does not fit the experiment.
  """

  def __init__(
    self,
    experiment: Experiment,
    workdir: str,
    about: dict,
    fill: Callable[[Any], tuple[Any, Any]] | None = None,
  ):
    self.experiment, self.goodput = experiment, Goodput()
    self._fill = fill
    self.workdir = place(workdir)
    self.program = experiment.program
    found = build_components(experiment)
    self.validation, self.meter = found.validation, found.meter
    self.lanes, self._match = found.stream, found.match
    identities = {
      **found.identities,
      'steps an update': f'{experiment.optimizer.every}',
    }
    self.about = about | identities | {'documents': found.documents}
    self.checkpoints = Checkpoints(
      self.workdir / 'checkpoints',
      experiment.keep,
      experiment.best_metric,
      experiment.best_is,
    )
    hosts.agree(
      identities
      | {
        'code of meliad_rec or jax': hosts.code(),
        'newest step': f'{self.checkpoints.latest()}',
        'settings': _shared_settings(about.get('config', '')),
        'use of --init_from': f'{fill is not None}',
      }
    )
    self.step, self.position = 0, self.lanes.position
    self.progress, self.profile = Progress(), Profile()
    self.state = self.batch = self.saved = None
    self.finished = self._same_split = False
    self.unread = None  # The last step, whose metrics are still on the devices.

  def begin(self) -> None:
    """Restores the newest checkpoint or creates a new state, and compiles.

    Everything that `save` needs is compiled too, because a run that is asked to
    stop has no time for compilation.

    A state with parameters from `fill` is saved at once, so that the run never
    needs their source again. It is saved only after the compilation, which may
    find that a step does not fit in memory: then the folder has no checkpoint,
    and the run can begin with other sizes.

    Raises:
      ValueError: the checkpoint belongs to another experiment, another run is
        using the folder, or the disk has too little space for a checkpoint.
    """
    with Lock(self.workdir) as self.lock:
      journal.check(self.workdir)
      newest = self.checkpoints.latest()
      if (newest or 0) < self.experiment.last_step:
        self.checkpoints.check_space(self.program.shapes)
      if newest is None:
        self.create()
      else:
        self.restore()
      self.progress = self.progress.judged_by(
        self.experiment.best_metric,
        self.about['validation'],
        self._same_split,
      )
      self.finished = self.step == self.saved and self._is_at_end()
      if self.step < self.experiment.last_step:
        with self.goodput.on('compile'), at_once():
          for segment in sorted(self.lanes.segments):
            program = self.experiment.programs[segment]
            _ = program.train_step
            times = program.rows // self.experiment.batch
            rows = len(self.lanes.local_rows) * times
            self.evaluate_batch(program.empty_batch(rows))
          _ = fingerprints(self.state)
        logging.info('Compiled in %.1f s.', self.goodput.seconds['compile'])
      if newest is None and self._fill is not None:
        with self.goodput.on('checkpoint'):
          self.save(None)
      self.report = Report(
        self.workdir,
        self.step,
        self.experiment.last_step,
        logger=self.experiment.metrics_logger,
        config=config.settings(self.about.get('config', '')),
      )

  def create(self) -> None:
    """Creates the state of a new run; `fill` replaces its parameters."""
    self.state = self.program.create(self.experiment.seed)
    if self._fill is not None:
      params, source = self._fill(self.state.params)
      hosts.agree({'--init_from': f'{source}'})
      self.state = self.program.begin_with(self.state, params)
      for line in f'{source}'.splitlines():
        logging.info('%s', line)
      self.about['began with'] = f'{source}'

  def restore(self) -> None:
    """Restores the newest checkpoint.

    It holds the state, the position in the data and the progress.
    """
    names = *self._match, 'steps an update'
    match = {name: self.about[name] for name in names}
    self.step, self.state, data, about = self.checkpoints.restore(
      self.program.shapes, match=match
    )
    known = about.get('validation split')
    self._same_split = known == self.about['validation split']
    self.about = about | self.about  # Also what the run began with.
    self.saved, self.position = self.step, data['position']
    self.lanes.seek(self.position)
    self.progress = Progress(**data['progress'])
    logging.info('Resuming from step %d of %s.', self.step, self.workdir)

  def live(self, first: Callable[[], None] = lambda: None) -> str | None:
    """Trains until the last step, an early stop, or a request to stop.

    Args:
      first: called before training. If it fails, the run is closed as well.

    Returns:
      The reason why the run was stopped, such as 'it was asked to stop', or
      None if it reached the last step without such a reason.

    Raises:
      ValueError: a loss or gradient norm is not finite, a save failed, or the
        folder was removed.
    """
    batches = self.goodput.waiting(prefetch(self.lanes, 2))
    with contextlib.ExitStack() as stack:
      for close in (  # Called from last to first.
        self.lock.release,
        self.goodput.on('checkpoint')(self.checkpoints.close),
        self.report.close,
        self.profile.close,
        batches.close,
      ):
        stack.push(_log_later_error(close))
      try:
        first()
        return self.train_to_end(batches)
      except (OSError, ValueError):
        self.lock.check()  # Without its folder, a run fails in many ways.
        raise

  def train_to_end(self, batches: Iterator) -> str | None:
    """Alternates `evaluate_and_save` and `train` until the run ends.

    Args:
      batches: (batch, position of the next batch) of each step.

    Returns:
      What `live` returns.
    """
    while True:
      reason = self.evaluate_and_save()
      if reason or self.step >= self.experiment.last_step:
        return reason
      self.train(batches)

  def evaluate_and_save(self) -> str | None:
    """Evaluates every `eval_every` steps, and saves every `save_every` steps.

    Also does both after the last step. Saves after each evaluation, and if the
    run was asked to stop.

    Returns:
      The reason why the run must end now, or None if there is none.
    """
    stop, metrics = self.checkpoints.preempted(), None
    evaluates = self.is_due(self.experiment.eval_every)
    if stop or evaluates or self.is_due(self.experiment.save_every):
      self.lock.check()
      with self.goodput.on('step'):
        self.read(at_once=True)
      self.meter.pause()
      if evaluates and not stop and self.step > self.progress.evaluated:
        with self.goodput.on('evaluation'):
          metrics = self.evaluate()
        stop = metrics is None
      with self.goodput.on('checkpoint'):
        self.report.sync()
        self.save(metrics)
    if stop:
      return 'it was asked to stop'
    done = self.step >= self.experiment.last_step
    if not done and self.progress.is_stale(self.experiment.patience):
      return f'{self.progress.since_best} evaluations gave no new best'
    return None

  def train(self, batches: Iterator[tuple[Batch, Position]]) -> None:
    """Dispatches the next step, and reads the metrics of the previous one.

    Args:
      batches: (batch, position of the next batch) of each step.
    """
    self.meter.start()
    self.batch, self.position = next(batches)
    program = self.program_of(self.batch)
    self.step += 1
    with self.goodput.on('step'), self.profile.step(self.step):
      batch = program.put(self.batch, program.rows)
      self.state, sums = program.train_step(self.state, batch)
      self.read()
    self.unread = self.step, self.position['tokens'], self.batch, sums

  def read(self, at_once: bool = False) -> None:
    """Waits for the last step that was dispatched, and reads its metrics.

    Once in `log_every` steps, the metrics of the steps since the last report
    are reported.

    Args:
      at_once: whether to report in any case. A step whose loss or gradient norm
        is not finite is always reported.

    Raises:
      ValueError: the loss or the gradient norm of the step is not finite.
    """
    if self.unread is None:
      return
    (step, tokens, batch, sums), self.unread = self.unread, None
    sums = self.meter.add(sums, self.program_of(batch).segment)
    due = at_once or step % self.experiment.log_every == 0
    if due or not meter.is_finite(sums):
      self.report.write(step, self.meter.metrics(step, tokens))
      self.meter.start()
    # After `write`, so that the screen shows one of the two losses of a step.
    loss = sums.nats / sums.scored if sums.scored else None
    self.report.tick(step, loss, lambda: self.meter.learning_rate(step))
    meter.check_finite(f'Step {step}', batch, sums)

  def is_due(self, every: int) -> bool:
    """Returns whether the current step is the last or a multiple of `every`.

    Returns False before the first step.
    """
    last = self.step == self.experiment.last_step
    return self.step > 0 and (self.step % every == 0 or last)

  def _is_at_end(self) -> bool:
    """Returns whether the run is over and its last evaluation is done.

    A run is over after its last step, or if `patience` ended it.
    """
    due = self.is_due(self.experiment.eval_every)
    if due and self.step > self.progress.evaluated:
      return False
    stale = self.progress.is_stale(self.experiment.patience)
    return stale or self.step >= self.experiment.last_step

  def evaluate(self) -> dict[str, float] | None:
    """Evaluates the run, and updates `progress`.

    Returns:
      The validation metrics, {metric: value}; None if the run was asked to stop
      during the evaluation.
    """
    params = self.state.params if self.state.ema is None else self.state.ema
    stop = self.checkpoints.preempted
    metrics = self.validation.evaluate(params, self.step, self.report, stop)
    if metrics is not None:
      value = metrics[self.experiment.best_metric]
      best_is = self.experiment.best_is
      self.progress = self.progress.after(self.step, value, best_is)
    return metrics

  def evaluate_batch(self, batch: Batch) -> Sums:
    """Returns the Sums of the current parameters on one batch.

    The carry is empty. `begin` compiles what this needs.
    """
    rows = self.program_of(batch).rows
    return evaluate_batch(self.program, self.state.params, batch, rows)

  def program_of(self, batch: Batch) -> TrainProgram:
    """Returns the training step for batches of this shape."""
    if not isinstance(batch, Batch):
      return self.program
    return self.experiment.programs[batch.tokens_BT.shape[1]]

  def save(self, metrics: dict[str, float] | None) -> None:
    """Starts to save the run.

    Does nothing if the current step is already saved and has no new metrics.

    Args:
      metrics: validation metrics of the current step; None: not evaluated.

    Raises:
      ValueError: the parameters after the last update give a loss that is not
        finite on the batch of that update.
    """
    if self.step == self.saved and metrics is None:
      return
    # The reported loss is from before the update, which may have ruined it.
    if self.batch is not None:
      what = f'Step {self.step}, after its update,'
      meter.check_finite(what, self.batch, self.evaluate_batch(self.batch))
    data = {'position': self.position, 'progress': asdict(self.progress)}
    self.checkpoints.save(self.step, self.state, data, self.about, metrics)
    self.saved = self.step


def _shared_settings(text: str) -> str:
  """Returns the settings that all hosts must share, as text.

  Otherwise each host would train parameters of its own, without any sign of it.
  Paths are left out, because data may be in another place on each host; the
  data themselves are compared by their hashes.

  Args:
    text: the configuration, from config.operative.
  """
  found = {k: repr(v) for k, v in config.settings(text).items()}
  return '\n'.join(
    f'{k} = {found[k]}' for k in sorted(found) if '/' not in found[k]
  )


def _log_later_error(close: Callable[[], None]) -> Callable:
  """Returns an exit callback that calls `close`.

  If the run has already failed, an error of `close` is only logged.
  """

  def exit_(kind, error, traceback):
    try:
      close()
    except BaseException as later:
      if error is None:
        raise
      if not getattr(later, 'logged', False):
        logging.error('Another error while closing the run: %s', later)

  return exit_
