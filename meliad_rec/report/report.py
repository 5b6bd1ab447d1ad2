"""Writes a run's metrics to metrics.jsonl, to TensorBoard and to the screen.

The run's folder holds metrics.jsonl (journal.py) and `tensorboard/SPLIT`, one
folder per split, so that training and validation share a chart.
"""

from collections.abc import Callable
from collections.abc import Mapping
import contextlib
import os
from pathlib import Path
import tempfile
import time
from typing import Any
from typing import TextIO

from absl import logging
import jax

from meliad_rec.report import journal
from meliad_rec.report import plot
from meliad_rec.report.board import Board
from meliad_rec.report.console import Console
from meliad_rec.report.loggers import Guarded
from meliad_rec.report.loggers import MetricsLogger
from meliad_rec.storage.workdir import in_bucket
from meliad_rec.storage.workdir import place
from meliad_rec.storage.workdir import upload


class Report:
  """A writer of a run's metrics and texts, which writes on the first host only.

  A run that was killed may have written lines for steps after its last
  checkpoint. When it resumes, it trains these steps again, so their lines are
  dropped first, and each step occurs once. The lines of a step must therefore
  be written before its checkpoint is saved.

  The files of a run in a bucket are written to a temporary folder and uploaded
  by `sync` and `close`.

  A full disk does not end the run: lines that cannot be written are kept, and
  `sync` writes them when that is possible again.

  Args:
    workdir: the run's folder.
    resume_step: training steps done in the restored checkpoint; lines of later
      steps are dropped. 0 means a new run: all lines are moved to another file;
      see journal.truncate.
    total_steps: steps of the run, for the progress bar; None: not known.
    stream: where lines and bar are shown; None: standard output.
    logger: also receives the metrics; None: no logger.
    config: settings of the run, for the logger; see MetricsLogger.start.

  Raises:
    ValueError: a line of metrics.jsonl is not a record.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    resume_step: int,
    total_steps: int | None = None,
    stream: TextIO | None = None,
    logger: MetricsLogger | None = None,
    config: Mapping[str, Any] | None = None,
  ):
    self._on = jax.process_index() == 0
    if not self._on:
      return
    self._workdir = self._folder = place(workdir)
    if in_bucket(self._workdir):
      self._temporary = tempfile.TemporaryDirectory()
      self._folder = Path(self._temporary.name, self._workdir.name)
    self._folder.mkdir(parents=True, exist_ok=True)
    path = self._folder / journal.NAME
    if in_bucket(self._workdir):
      for name in journal.NAME, journal.OLD:
        if (self._workdir / name).exists():
          content = (self._workdir / name).read_bytes()
          (self._folder / name).write_bytes(content)
    self._resume_step = resume_step
    self._boards = {}
    self._plot_failed = False
    dropped = journal.truncate(path, resume_step)
    self._journal = journal.Journal(path)
    self._console = Console(total_steps, resume_step, stream)
    self._logger = Guarded(logger) if logger else None
    if self._logger:
      self._logger.start(os.fspath(workdir), resume_step, config or {})
    if dropped:
      why = (
        'there is no later checkpoint, so this run begins at step 0. They are'
        f' kept in {journal.OLD}'
      )
      if resume_step:
        why = (
          f'they were written after the checkpoint of step {resume_step}, from'
          ' which this run resumes'
        )
      self._console.line(
        f'Dropped {dropped} lines of {os.fspath(workdir)}/{journal.NAME}:'
        f' {why}.'
      )

  def write(
    self, step: int, values: Mapping[str, float], split: str = 'train'
  ) -> None:
    """Writes metrics to the files, to the logger and, if due, to the screen.

    Args:
      step: training steps done.
      values: {metric: value}. The values are Python numbers, not device arrays.
        metrics/metrics.py lists the common names.
      split: 'train', 'validation' or another split. The error of the trivial
        predictor NAME has the split journal.TRIVIAL + NAME; plots show it as a
        dashed or dotted line.
    """
    if not self._on:
      return
    record = {'step': step, 'split': split, 'time': round(time.time(), 3)}
    self._journal.append(record | dict(values))
    self._board(split).write(step, values)
    self._console.write(step, split, values)
    if self._logger:
      self._logger.log(step, {f'{split}/{k}': v for k, v in values.items()})

  def tick(
    self, step: int, loss: float | None, learning_rate: Callable[[], float]
  ) -> None:
    """Shows a training step on the screen only; see Console.tick."""
    if self._on:
      self._console.tick(step, loss, learning_rate)

  def text(self, step: int, name: str, text: str) -> None:
    """Writes a text, such as a sample, to the files and to the screen.

    Args:
      step: training steps done.
      name: name of the text, such as 'sample'.
      text: the text.
    """
    if not self._on:
      return
    self._journal.append({'step': step, 'text': {name: text}})
    # TensorBoard renders Markdown, except for indented blocks.
    block = '\n'.join('    ' + line for line in text.split('\n'))
    self._board('text').text(step, name, block)
    self._console.line(f'step {step}  {name}:\n{text}')

  def plot(self, metric: str = 'loss_nats_per_token') -> None:
    """Draws a metric into the run's folder, as METRIC.png; see plot.plot."""
    if not self._on:
      return
    try:
      plot.plot(self._folder, metric)
      self._plot_failed = False
    except (OSError, ValueError) as error:  # Lines may not have been written.
      if not self._plot_failed:
        logging.error(
          'The plot of %s was not drawn (%s). The run continues.', metric, error
        )
      self._plot_failed = True

  def sync(self) -> None:
    """Writes the lines that were kept, and uploads the files to a bucket.

    Call it before a checkpoint is saved.
    """
    if not self._on:
      return
    for file in self._journal, *self._boards.values():
      file.flush()
    if self._folder is not self._workdir:
      upload(self._folder, self._workdir)

  def close(self) -> None:
    """Closes files, screen and logger, and uploads the files like `sync`.

    If one of them fails, the others are closed nevertheless.
    """
    if not self._on:
      return
    with contextlib.ExitStack() as stack:  # Calls the last one first.
      for file in self._journal, *self._boards.values():
        stack.callback(file.close)
      if self._logger:
        stack.callback(self._logger.close)
      stack.callback(self._console.close)
      stack.callback(self.sync)

  def _board(self, split):
    if split not in self._boards:
      # Hides what a killed run wrote after the checkpoint.
      purge = self._resume_step + (self._resume_step > 0)
      folder = self._folder / 'tensorboard' / split
      self._boards[split] = Board(folder, purge)
    return self._boards[split]
