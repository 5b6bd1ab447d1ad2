"""A trace of some training steps, for XProf: where each step's time goes.

pip install xprof; xprof --logdir=WORKDIR/profile
"""

from collections.abc import Iterator
import contextlib
import os
import re

from absl import logging
import jax

from meliad_rec.storage.mirror import Mirror


def steps(text: str) -> range:
  """The steps that 'FIRST:LAST' names, both of them traced.

  Raises:
    ValueError: it names none.
  """
  found = re.fullmatch(r'(\d+):(\d+)', text)
  first, last = map(int, found.groups()) if found else (0, 0)
  if not 1 <= first <= last:
    raise ValueError(
      f'--profile is {text!r}; give the first and the last step to trace, such'
      ' as 10:15.'
    )
  return range(first, last + 1)


class Profile:
  """Writes the trace of process 0, once, into a folder.

  Args:
    folder: where it goes; made if there is a trace. None: nowhere.
    traced: steps, one after the other; empty: nothing is traced.
  """

  def __init__(
    self, folder: os.PathLike | None = None, traced: range = range(0)
  ):
    self._folder, self._traced = folder, traced
    self._on = False
    self._begins = bool(traced) and jax.process_index() == 0

  @contextlib.contextmanager
  def step(self, step: int) -> Iterator[None]:
    """Names the body as a step, and traces it if it is one of those.

    Args:
      step: counted from 1; the body starts it, and waits for the one before.
    """
    if self._begins and step in self._traced:
      self._begins, self._on = False, True
      self._mirror = Mirror(self._folder)
      jax.profiler.start_trace(self._mirror.folder)
    # The last of them is only waited for in the step after it.
    if self._on and step > self._traced[-1] + 1:
      self.close()
    with jax.profiler.StepTraceAnnotation('train', step_num=step):
      yield

  def close(self) -> None:
    """Writes what there is of the trace; a second call does nothing."""
    if self._on:
      self._on = False
      jax.profiler.stop_trace()
      self._mirror.sync()
      logging.info('The trace for XProf is in %s.', self._folder)
    elif self._begins:
      self._begins = False
      logging.warning(
        'Nothing was traced: none of the steps %d to %d of --profile was'
        ' trained.',
        self._traced[0],
        self._traced[-1],
      )
