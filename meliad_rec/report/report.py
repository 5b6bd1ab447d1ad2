"""Where a run's figures go: metrics.jsonl, TensorBoard and the screen.

In the run's folder: metrics.jsonl (journal.py) and `tensorboard/SPLIT`, one
folder a split, so that training and validation share a chart.
"""

from collections.abc import Mapping
import os
import time
from typing import TextIO

import jax

from meliad_rec.report import journal
from meliad_rec.report import plot
from meliad_rec.report.console import Console
from meliad_rec.storage.mirror import Mirror


class Report:
  """Writes a run's figures and texts, on the first host only.

  A run that was killed has written lines after its last checkpoint. The run
  that goes on from there trains those steps again, so that their lines are
  dropped first, and each step occurs once. A step's lines must therefore be
  written before the step's checkpoint is saved.

  Args:
    workdir: the run's folder; in a bucket, it has what `sync` has brought.
    resume_step: training steps done in what was restored; lines of later
      steps are dropped. 0: a run from the start, every line is dropped. None:
      nothing is dropped, for commands that add to a finished run.
    total_steps: of the run, for the progress bar; None: not known.
    stream: the screen; None: standard output.

  Raises:
    ValueError: metrics.jsonl holds a line that is not a record.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    resume_step: int | None = None,
    total_steps: int | None = None,
    stream: TextIO | None = None,
  ):
    self._on = jax.process_index() == 0
    if not self._on:
      return
    self._mirror = Mirror(workdir, (journal.NAME,))
    self._workdir = self._mirror.folder
    self._workdir.mkdir(parents=True, exist_ok=True)
    self._resume_step = resume_step
    self._boards = {}
    path = self._workdir / journal.NAME
    dropped = 0
    if resume_step is not None:
      dropped = journal.truncate(path, resume_step)
    self._journal = journal.Journal(path)
    self._console = Console(total_steps, resume_step or 0, stream)
    if dropped:
      self._console.line(
        f'Dropped {dropped} lines of {os.fspath(workdir)}/{journal.NAME}: they '
        'are of a run that was '
        f'stopped, and this one goes on from step {resume_step}.'
      )

  def write(
    self, step: int, values: Mapping[str, float], split: str = 'train'
  ) -> None:
    """Writes figures.

    Args:
      step: training steps done.
      values: by name, with names from metrics/units.py where one fits;
        Python numbers, not device arrays.
      split: 'train', 'validation', ...; a folder's name; or journal.TRIVIAL and
        the name of a trivial answer, drawn beside what the run does.
    """
    if not self._on:
      return
    record = {'step': step, 'split': split, 'time': round(time.time(), 3)}
    self._journal.append(record | dict(values))
    board = self._board(split)
    for name, value in values.items():
      board.add_scalar(name, value, step)
    self._console.write(step, split, values)

  def text(self, step: int, name: str, text: str) -> None:
    """Writes a text, such as a sample, under a name."""
    if not self._on:
      return
    self._journal.append({'step': step, 'text': {name: text}})
    # TensorBoard shows Markdown: an indented block is shown as it is.
    block = '\n'.join('    ' + line for line in text.split('\n'))
    self._board('text').add_text(name, block, step)
    self._console.line(f'step {step}  {name}:\n{text}')

  def plot(self, metric: str = 'loss_nats_per_token') -> None:
    """Draws the figures so far; see plot.plot."""
    if self._on:
      plot.plot(self._workdir, metric)

  def sync(self) -> None:
    """Brings all to a bucket, if the run's folder is in one."""
    if self._on:
      self._mirror.sync()

  def close(self) -> None:
    """Flushes and closes everything."""
    if not self._on:
      return
    for board in self._boards.values():
      board.close()
    self._journal.close()
    self._console.close()
    self._mirror.sync()

  def _board(self, split):
    if split not in self._boards:
      import tensorboardX

      # TensorBoard hides what a killed run wrote from this step on.
      purge = None
      if self._resume_step is not None:
        purge = self._resume_step + (self._resume_step > 0)
      self._boards[split] = tensorboardX.SummaryWriter(
        str(self._workdir / 'tensorboard' / split),
        purge_step=purge,
        flush_secs=10,
      )
    return self._boards[split]
