"""Traces some training steps for XProf, which shows where time is spent.

To see the trace of a run in WORKDIR:

  pip install xprof
  xprof --logdir=WORKDIR/profile
"""

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import re
import tempfile

from absl import logging
import jax

from meliad_rec.storage.workdir import in_bucket
from meliad_rec.storage.workdir import upload


def steps(text: str) -> range:
  """Parses 'FIRST:LAST', the numbers of the first and the last step to trace.

  Returns:
    The range of these steps, which includes LAST.

  Raises:
    ValueError: the text has another form, FIRST is 0, or LAST is before FIRST.
  """
  found = re.fullmatch(r'(\d+):(\d+)', text)
  first, last = map(int, found.groups()) if found else (0, 0)
  if not 1 <= first <= last:
    raise ValueError(
      '--profile must be the first and the last step to trace, such as 10:15, '
      f'got {text!r}.'
    )
  return range(first, last + 1)


def options() -> jax.profiler.ProfileOptions:
  """Returns options with which a trace has no calls of Python functions.

  These fill most of a trace. With them, the profiler of jax 0.10.2 once crashed
  as a trace ended.
  """
  found = jax.profiler.ProfileOptions()
  found.python_tracer_level = 0
  return found


class Profile:
  """A tracer that writes one trace of some training steps, on process 0.

  Args:
    folder: where the trace is written; created if needed.
    traced: numbers of the consecutive steps to trace, from 1; an empty range
      traces nothing.
  """

  def __init__(
    self, folder: os.PathLike | None = None, traced: range = range(0)
  ):
    self._folder, self._traced = folder, traced
    self._on, self._temporary = False, None
    self._begins = bool(traced) and jax.process_index() == 0

  @contextlib.contextmanager
  def step(self, step: int) -> Iterator[None]:
    """Marks a `with` body as one step, and traces it if it is to be traced.

    Args:
      step: number of the step, from 1. The body dispatches this step and waits
        for the previous one.
    """
    if self._begins and step in self._traced:
      self._begins, self._on = False, True
      folder = self._folder
      if in_bucket(folder):  # The profiler writes to a disk only.
        self._temporary = tempfile.TemporaryDirectory()
        folder = self._temporary.name
      jax.profiler.start_trace(folder, profiler_options=options())
    # The last traced step finishes during the step after it.
    if self._on and step > self._traced[-1] + 1:
      self.close()
    with jax.profiler.StepTraceAnnotation('train', step_num=step):
      yield

  def close(self) -> None:
    """Ends the trace and writes it; a second call does nothing.

    If none of the steps to trace has run, this is logged as a warning.
    """
    if self._on:
      self._on = False
      jax.profiler.stop_trace()
      if self._temporary:
        upload(Path(self._temporary.name), self._folder)
      logging.info('The trace for XProf is in %s.', self._folder)
    elif self._begins:
      self._begins = False
      logging.warning(
        'Nothing was traced, because none of the steps %d to %d of --profile'
        ' ran.',
        self._traced[0],
        self._traced[-1],
      )
