"""The life of a run, from its first batch to its last checkpoint.

State, data position and progress are saved together, and a run that goes on
from them does what one that never stopped does, on CPU and TPU bit for bit.
Step n + 1 is on the devices before the figures of step n are read.

Closing several things at the end, without losing what went wrong first.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
from dataclasses import asdict

from absl import logging

from meliad_rec.data.lanes import Lanes
from meliad_rec.data.prefetch import prefetch
from meliad_rec.distributed import hosts
from meliad_rec.distributed.partition import local_rows
from meliad_rec.evaluation.evaluation import probe
from meliad_rec.report.report import Report
from meliad_rec.storage.checkpoints import Checkpoints
from meliad_rec.storage.workdir import Lock
from meliad_rec.storage.workdir import place
from meliad_rec.training import meter
from meliad_rec.training.experiment import Experiment
from meliad_rec.training.goodput import Goodput
from meliad_rec.training.profile import Profile
from meliad_rec.training.progress import Progress
from meliad_rec.training.validation import Validation


@contextlib.contextmanager
def closing(*closes: Callable[[], None]) -> Iterator[None]:
  """Calls each at the end, in order, whatever the others raise.

  The first error, be it of the body, is raised; each later one is an error
  line.
  """
  first = None
  try:
    yield
  except BaseException as error:
    first = error
  for close in closes:
    try:
      close()
    except BaseException as error:
      if first is None:
        first = error
      else:
        logging.error('While closing: %s', error)
  if first is not None:
    raise first


class Run:
  """A run on this host: `begin`, then `live`; the rest are parts of its life.

  Args:
    experiment: what the run is.
    workdir: where it writes.
    about: JSON-able facts, kept with each checkpoint.

  Raises:
    ValueError: no folder can be there, or the hosts have different data.
  """

  def __init__(self, experiment: Experiment, workdir: str, about: dict):
    self.experiment, self.goodput = experiment, Goodput()
    self.workdir = place(workdir)
    self.program = experiment.program
    documents = experiment.data.documents('train')
    self.validation = Validation(experiment)
    self.lanes = Lanes(
      documents,
      experiment.batch,
      experiment.segment,
      seed=experiment.seed,
      shorter_first=experiment.shorter_first,
      local_rows=local_rows(self.program.mesh, experiment.batch),
    )
    read = {
      'tokenizer': experiment.data.vocabulary.identity,
      'data': documents.identity,
      'validation': self.validation.documents.identity,
      'validation split': self.validation.split,
      'steps an update': f'{experiment.optimizer.every}',
    }
    self.about = about | read
    self.checkpoints = Checkpoints(
      self.workdir / 'checkpoints',
      experiment.keep,
      experiment.best_metric,
      experiment.best_is,
    )
    hosts.agree(read | {'newest step': f'{self.checkpoints.latest()}'})
    self.meter = meter.Meter(self.program, documents)
    self.step, self.position = 0, self.lanes.position
    self.progress, self.profile = Progress(), Profile()
    self.state = self.batch = self.saved = None

  def begin(self) -> None:
    """Takes up the newest checkpoint, or starts anew; compiles.

    Raises:
      ValueError: the checkpoint is of another experiment, or the folder in use.
    """
    with Lock(self.workdir) as self.lock:
      if self.checkpoints.latest() is None:
        self.state = self.program.create(self.experiment.seed)
      else:
        same = 'tokenizer', 'data', 'steps an update'
        match = {name: self.about[name] for name in same}
        found = self.checkpoints.restore(self.program.shapes, match=match)
        self.step, self.state, data, _ = found
        self.saved, self.position = self.step, data['position']
        self.lanes.seek(self.position)
        self.progress = Progress(**data['progress'])
        logging.info('Going on from step %d of %s.', self.step, self.workdir)
      self.progress = self.progress.judged_by(
        self.experiment.best_metric, self.about['validation']
      )
      with self.goodput.on('compile'):
        for step in {self.step, self.experiment.steps}:
          _ = self.experiment.program_of(step).train_step
      logging.info('Compiled in %.1f s.', self.goodput.seconds['compile'])
      self.report = Report(self.workdir, self.step, self.experiment.steps)

  def live(self) -> str | None:
    """Trains until the last step, an early stop, or a request to stop.

    Returns:
      Why it ended before the last step; None if it did not.

    Raises:
      ValueError: a loss or gradient is not finite, or a save failed.
    """
    batches = self.goodput.waiting(prefetch(self.lanes, 2))
    unread = None  # The last step, whose figures are still on the devices.
    with closing(
      batches.close,
      self.profile.close,
      self.report.close,
      self.goodput.on('checkpoint')(self.checkpoints.close),
      self.lock.release,
    ):
      while True:
        stop = self.checkpoints.preempted()
        evaluates = self.is_due(self.experiment.eval_every)
        if stop or evaluates or self.is_due(self.experiment.save_every):
          with self.goodput.on('step'):
            self.read(unread, at_once=True)
          unread = metrics = None
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
        if self.step >= self.experiment.steps:
          return None
        if self.progress.is_stale(self.experiment.patience):
          return f'{self.progress.since_best} evaluations gave no new best'
        self.meter.start()
        self.batch, position = next(batches)
        program = self.experiment.program_of(self.step)
        self.step, self.position = self.step + 1, position
        with self.goodput.on('step'), self.profile.step(self.step):
          here = program.put(self.batch, self.experiment.batch)
          self.state, sums = program.train_step(self.state, here)
          self.read(unread)
        unread = self.step, position['tokens'], self.batch, sums

  def is_due(self, every: int) -> bool:
    """Whether something done every so many steps, and at the end, is due."""
    last = self.step == self.experiment.steps
    return self.step > 0 and (self.step % every == 0 or last)

  def read(self, unread, at_once: bool = False) -> None:
    """Waits for a step, and reports where a line is due or it went wrong."""
    if unread is None:
      return
    step, tokens, batch, sums = unread
    sums = self.meter.add(sums)
    due = at_once or step % self.experiment.log_every == 0
    if due or not meter.is_finite(sums):
      self.report.write(step, self.meter.figures(step, tokens))
      self.meter.start()
    meter.check_finite(f'Step {step}', batch, sums)

  def evaluate(self) -> dict[str, float] | None:
    """Validation figures; None if it was asked to stop meanwhile."""
    params = self.state.params if self.state.ema is None else self.state.ema
    stop = self.checkpoints.preempted
    figures = self.validation.evaluate(params, self.step, self.report, stop)
    if figures is not None:
      value = figures[self.experiment.best_metric]
      best_is = self.experiment.best_is
      self.progress = self.progress.after(self.step, value, best_is)
    return figures

  def save(self, metrics: dict[str, float] | None) -> None:
    """Starts saving where the run stands, unless all is saved already.

    Raises:
      ValueError: the last update made the parameters useless.
    """
    if self.step == self.saved and metrics is None:
      return
    # A step's loss is that before its update, which may have ruined all.
    if self.batch is not None:
      sums = probe(
        self.program, self.state.params, self.batch, self.experiment.batch
      )
      meter.check_finite(f'Step {self.step}, updated,', self.batch, sums)
    data = {'position': self.position, 'progress': asdict(self.progress)}
    self.checkpoints.save(self.step, self.state, data, self.about, metrics)
    self.saved = self.step
