"""Loggers that receive a run's metrics, in addition to its own folder.

A gin file sets the logger of a run. options/report/wandb.gin sets Weights &
Biases. Any other class with the three methods of MetricsLogger can be set in
the same way:

    from __gin__ import dynamic_registration
    from meliad_rec.training import experiment
    import my_loggers  # A module in the folder where training starts.

    experiment.Experiment.metrics_logger = @my_loggers.MLflow()

The class in my_loggers.py:

    import mlflow

    class MLflow:
      def start(self, workdir, step, config):
        mlflow.start_run(run_name=workdir)
        mlflow.log_params(config)

      def log(self, step, metrics):
        mlflow.log_metrics(metrics, step)

      def close(self):
        mlflow.end_run()
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import importlib.util
import secrets
import tempfile
from typing import Any
from typing import Literal
from typing import Protocol
from typing import runtime_checkable

from absl import logging

from meliad_rec.storage.workdir import in_bucket
from meliad_rec.storage.workdir import place


@runtime_checkable
class MetricsLogger(Protocol):
  """The interface of a logger; it is called on the first host only."""

  def start(self, workdir: str, step: int, config: Mapping[str, Any]) -> None:
    """Begins logging; called before the first step.

    Args:
      workdir: folder of the run.
      step: training steps already done; 0 for a new run.
      config: {name of a setting: its value}, for every setting. Numbers,
        strings, bools and None are such values, and so are tuples and lists of
        these. Any other value is given as its text in gin.
    """

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    """Receives metrics.

    A run that resumes after a crash may log some steps for a second time.

    Args:
      step: training steps done.
      metrics: {'SPLIT/METRIC': value}, with names such as
        'train/loss_nats_per_token'.
    """

  def close(self) -> None:
    """Ends logging; is also called when the run is stopped or fails."""


class Guarded:
  """A MetricsLogger that calls another one, whose errors do not end the run.

  Only the first error is logged. If the other logger cannot start, it is not
  called again.

  Args:
    logger: the other logger.
  """

  def __init__(self, logger: MetricsLogger):
    self._logger = logger
    self._started = self._failed = False

  def start(self, workdir: str, step: int, config: Mapping[str, Any]) -> None:
    self._started = self._call(self._logger.start, workdir, step, config)

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    if self._started:
      self._call(self._logger.log, step, metrics)

  def close(self) -> None:
    if self._started:
      self._call(self._logger.close)

  def _call(self, method: Callable, *args) -> bool:
    """Calls a method of the other logger, and returns whether it succeeded."""
    # Any library may be called here.
    try:
      method(*args)
    except Exception as error:
      if not self._failed:
        first, *_ = f'{error}'.splitlines() or ['']
        logging.error(
          'The metrics logger %s failed (%s: %s). The run continues, and later'
          ' errors of the logger are not shown.',
          type(self._logger).__name__,
          type(error).__name__,
          first,
        )
      self._failed = True
      return False
    return True


@dataclasses.dataclass
class WandB:
  """A MetricsLogger that sends metrics to Weights & Biases (W&B).

  Needs meliad_rec[wandb]. A run that resumes continues the same W&B run, whose
  id is in the file wandb_id of its folder.

  Attributes:
    project: name of the W&B project.
    entity: W&B user or team; None: the default of the account.
    mode: 'online' sends metrics at once; 'offline' writes them to the folder of
      the run, to be sent later with `wandb sync`.
    tags: tags of the W&B run.

  Raises:
    ValueError: wandb is not installed.
  """

  project: str
  entity: str | None = None
  mode: Literal['online', 'offline'] = 'online'
  tags: tuple[str, ...] = ()

  def __post_init__(self):
    if importlib.util.find_spec('wandb') is None:
      raise ValueError(
        'loggers.WandB needs the package wandb. Install meliad_rec[wandb], or '
        'leave out options/report/wandb.'
      )

  def start(self, workdir: str, step: int, config: Mapping[str, Any]) -> None:
    import wandb

    folder = place(workdir)
    id_file = folder / 'wandb_id'
    if step == 0 or not id_file.is_file():
      id_file.write_text(secrets.token_hex(4))
    self._run = wandb.init(
      project=self.project,
      entity=self.entity,
      mode=self.mode,
      tags=self.tags,
      id=id_file.read_text(),
      resume='allow',
      name=folder.name if in_bucket(folder) else folder.resolve().name,
      config=dict(config),
      dir=tempfile.mkdtemp() if in_bucket(folder) else str(folder),
      settings=wandb.Settings(console='off'),
    )
    # W&B drops values logged for one of its own steps that has passed, so a
    # resumed run could not repeat steps. Here the step is a metric.
    self._run.define_metric('*', step_metric='step')

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    self._run.log({**metrics, 'step': step})

  def close(self) -> None:
    self._run.finish()
