"""Screen output: progress of a run or of other long work, and log messages.

Progress is shown as lines and, on a terminal, as a bar. Log messages are plain
lines on stderr.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import logging
import os
import sys
import time
from typing import TextIO

from absl import logging as absl_logging

# The metrics that are shown, in this order; metrics.jsonl has all of them.
_SHOWN = {
  'loss_nats_per_token': lambda x: f'loss {x:.4f} nats/token',
  'bits_per_byte': lambda x: f'{x:.4f} bits/byte',
  'word_perplexity': lambda x: f'perplexity {x:.4g} per word',
  'accuracy': lambda x: f'accuracy {x:.1%}',
  'error': lambda x: f'error {x:.2%}',
  'mean_return': lambda x: f'return {x:.3f}',
  'success': lambda x: f'success {x:.1%}',
  'episode_steps': lambda x: f'{x:.1f} steps',
  'entropy': lambda x: f'entropy {x:.3f} nats',
  'cleared_cost': lambda x: f'without state {x:+.4f} nats/token',
  'learning_rate': lambda x: f'lr {x:.2e}',
  'tokens_per_second': lambda x: f'{x:,.0f} tokens/s',
  'step_seconds': lambda x: (
    f'{1000 * x:.4g} ms/step' if x < 9 else f'{x:.4g} s/step'
  ),
  'mfu': lambda x: f'mfu {x:.1%}',
  'epoch': lambda x: f'epoch {x:.2f}',
  'padding_share': lambda x: f'padding {x:.1%}',
  'halting_depth': lambda x: f'depth {x:.2f}',
  'halting_depth_max': lambda x: f'at most {x:.0f}',
}

_TICK = 5.0  # Seconds between lines of single steps, at least.
_BAR = 0.5  # Seconds between updates of the bar.
_FREE_LINES = 20  # Lines of training that do not wait for an interval.
_ANNOUNCED = 10.0  # Seconds that a run must take to be announced.
_TIMED = 3  # Steps that are timed before the length of the run is announced.

_CONTROL = dict.fromkeys((*range(32), *range(127, 160)), '\ufffd')
del _CONTROL[ord('\n')], _CONTROL[ord('\t')]


def printable(text: str) -> str:
  """Returns text with the control characters replaced by U+FFFD.

  They could change how the terminal works. Newlines and tabs are kept.
  """
  return text.translate(_CONTROL)


def dots(text: str) -> str:
  """Returns the text with a dot in place of each unprintable character."""
  return ''.join(c if c.isprintable() else '\u00b7' for c in text)


def symbols(text: str) -> str:
  """Returns the text with symbols for newlines, tabs and spaces; see `dots`.

  One space before a word is left out.
  """
  if text[:1] == ' ' and text[1:2].strip():
    text = text[1:]
  for character, symbol in ('\n', '\u23ce'), ('\t', '\u21e5'), (' ', '\u2423'):
    text = text.replace(character, symbol)
  return dots(text)


class Console:
  """Progress of a run: lines, and on a terminal a bar below them.

  The first lines about training are all shown. Later ones are shown at
  intervals, which grow with the time that the run has taken.

  Args:
    total_steps: steps of the run; None: not known.
    step: training steps already done.
    stream: where to write; None: standard output.
  """

  def __init__(
    self,
    total_steps: int | None = None,
    step: int = 0,
    stream: TextIO | None = None,
  ):
    self._stream = stream or sys.stdout
    self._total = total_steps
    self._lines = 0
    self._last = self._drawn = time.monotonic()
    self._first = None  # Step and time of the first call of `tick`.
    self._announced = False
    self._bar = None
    if _is_terminal(self._stream):
      import tqdm

      self._bar = tqdm.tqdm(
        total=total_steps,
        initial=step,
        unit='step',
        file=self._stream,
        dynamic_ncols=True,
      )

  def tick(
    self, step: int, loss: float | None, learning_rate: Callable[[], float]
  ) -> None:
    """Shows, if it is time for it, that a training step is done.

    The bar is updated up to twice a second, and a line is shown at most every
    few seconds. If the metrics of this step are also passed to `write`, call
    `write` first. Its line shows the mean loss over several steps, and the loss
    of this step alone is then not shown next to it.

    Args:
      step: training steps done.
      loss: loss of the step, in nats per token. None: it has none, so that only
        the bar is updated.
      learning_rate: returns the learning rate; called only if it is shown.
    """
    now = time.monotonic()
    self._first = self._first or (step, now)
    self._announce(step, now)
    if self._bar is not None and now - self._drawn >= _BAR:
      self._drawn = now
      if loss is not None:
        shown = self._shown(loss, learning_rate(), ', ')
        self._bar.set_postfix_str(shown, refresh=False)
      self._bar.update(step - self._bar.n)
    # Half as often as `write`, whose lines say more.
    wait = max(_TICK, 2 * self._interval(now))
    if loss is None or now - self._last < wait:
      return
    self._train_line(
      step, self._shown(loss, learning_rate(), ' in this step  ')
    )

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Shows metrics as a line.

    Metrics of the split 'train' advance the bar, and are shown only if it is
    time for a line. Those of other splits are always shown.

    Args:
      step: training steps done.
      split: 'train', 'validation' or another split.
      values: {metric: value}. Metrics that are not in _SHOWN are left out.
    """
    shown = '  '.join(
      form(values[name]) for name, form in _SHOWN.items() if name in values
    )
    if split != 'train':
      self.line(self._line(step, split, shown))
      return
    if self._bar is not None:
      self._bar.update(step - self._bar.n)
    now = time.monotonic()
    few = self._lines < _FREE_LINES or step == self._total
    if few or now - self._last >= self._interval(now):
      self._train_line(step, shown)

  def line(self, text: str) -> None:
    """Shows text after `printable`, above the bar if there is one."""
    text = printable(text)
    if self._bar is not None:
      self._bar.write(text, file=self._stream)
    else:
      print(text, file=self._stream, flush=True)

  def close(self) -> None:
    """Closes the bar and leaves it on the screen."""
    if self._bar is not None:
      self._bar.close()

  def _shown(self, loss, learning_rate, between):
    values = {'loss_nats_per_token': loss, 'learning_rate': learning_rate}
    return between.join(_SHOWN[name](x) for name, x in values.items())

  def _train_line(self, step, shown):
    left = self._left(step, time.monotonic())
    self.line(self._line(step, 'train', f'{shown}{left and f"  {left} left"}'))
    self._lines += 1
    self._last = time.monotonic()

  def _line(self, step, split, shown):
    total = f'/{self._total}' if self._total else ''
    width = len(str(self._total or ''))
    return f'step {step:>{width}}{total}  {split:<10}  {shown}'

  def _interval(self, now):
    """Returns the seconds that must pass between two lines about training."""
    return (now - self._first[1]) / 50 if self._first else 0.0

  def _left(self, step, now) -> str:
    """Returns how long the remaining steps will take, as text from `duration`.

    Returns '' if this is not known.
    """
    first = self._first
    if not (first and self._total and first[0] < step < self._total):
      return ''
    seconds = (now - first[1]) / (step - first[0])
    return duration(seconds * (self._total - step))

  def _announce(self, step, now):
    """Shows how long the remaining steps will take, if that is long.

    This happens once, after the first few steps.
    """
    done = step - self._first[0]
    if self._announced or done < _TIMED or now - self._first[1] < 1:
      return
    self._announced = True
    seconds = (now - self._first[1]) / done
    left = self._left(step, now)
    if left and seconds * (self._total - step) >= _ANNOUNCED:
      self.line(
        f'A step takes {seconds:.3g} s: {self._total - step:,} more steps will '
        f'take about {left}, evaluations not included.'
      )


def _is_terminal(stream: TextIO) -> bool:
  """Returns whether a stream is a terminal that has room for a bar."""
  if not stream.isatty():
    return False
  try:
    return os.get_terminal_size(stream.fileno()).columns > 0
  except (OSError, ValueError):  # Its size is not known.
    return True


def duration(seconds: float) -> str:
  """Returns a time as text: '45 s', '12 min', '3 h 20 min' or '5 d 7 h'."""
  if seconds < 90:
    return f'{seconds:.0f} s'
  minutes = round(seconds / 60)
  if minutes < 90:
    return f'{minutes} min'
  hours, minutes = divmod(minutes, 60)
  if hours < 48:
    return f'{hours} h {minutes} min'
  return f'{hours // 24} d {hours % 24} h'


def counted(number: int, noun: str) -> str:
  """Returns a number and a noun, such as '1 document' or '1,000 documents'."""
  return f'{number:,} {noun}{"" if number == 1 else "s"}'


def use_plain_logs() -> None:
  """Formats every log message of the process as a plain line.

  Messages of level INFO from other packages are dropped. Messages of orbax and
  asyncio are dropped at every level, because storage/ reports failed saves. A
  second call changes nothing.
  """
  absl_logging.use_absl_handler()
  handler = absl_logging.get_absl_handler()
  handler.setFormatter(_Plain())
  handler.filters = [_is_for_people]
  sys.unraisablehook = _unraisable


@contextlib.contextmanager
def suppress_stderr() -> Iterator[None]:
  """Discards everything written to file descriptor 2 inside the context.

  This is for the import of TensorFlow. Its C++ code reports missing GPUs before
  it reads the settings that would silence it. Exceptions propagate as usual.
  """
  saved = os.dup(2)
  try:
    with open(os.devnull, 'wb') as null:
      os.dup2(null.fileno(), 2)
    yield
  finally:
    os.dup2(saved, 2)
    os.close(saved)


class _Plain(logging.Formatter):
  """A formatter that returns 'TEXT', 'warning: TEXT' or 'error: TEXT'."""

  def format(self, record):
    text = super().format(record)
    if record.levelno <= logging.INFO:
      return text
    return f'{record.levelname.lower()}: {text}'


def _unraisable(ignored):
  # After a save that failed, tensorstore's other writes find no event loop.
  if str(ignored.exc_value) != 'Event loop is closed':
    sys.__unraisablehook__(ignored)


def _is_for_people(record):
  # orbax reports errors of background saves with tracebacks; storage/ reports
  # the same errors in one sentence.
  if record.name == 'asyncio' or '/orbax/' in record.pathname:
    return False
  return record.name == 'absl' or record.levelno > logging.INFO


class Countdown:
  """Progress of long work: a bar on a terminal, lines elsewhere.

  Args:
    total: number of units in all; None: not known.
    unit: plural name of what is counted, such as 'tokens'.
    every: seconds between lines.
    stream: where to write; None: standard error.
  """

  def __init__(
    self,
    total: int | None,
    unit: str,
    every: float = 30.0,
    stream: TextIO | None = None,
  ):
    self._stream = stream or sys.stderr
    self._total, self._unit, self._every = total, unit, every
    self._began = self._last = time.monotonic()
    self._bar = None
    if _is_terminal(self._stream):
      import tqdm

      self._bar = tqdm.tqdm(
        total=total,
        unit=unit,
        unit_scale=True,
        file=self._stream,
        dynamic_ncols=True,
        leave=False,
      )

  def show(self, done: int) -> None:
    """Shows progress.

    A bar is updated at each call. If progress is shown as lines, at least
    `every` seconds pass between two lines.

    Args:
      done: number of units finished so far.
    """
    if self._bar is not None:
      self._bar.update(done - self._bar.n)
      return
    now = time.monotonic()
    if not done or now - self._last < self._every:
      return
    self._last = now
    rate = done / (now - self._began)
    whole = left = ''
    if self._total is not None:
      whole = f' of {self._total:,}'
      left = f', {duration((self._total - done) / rate)} left'
    print(
      f'{done:,}{whole} {self._unit}, {rate:,.0f} {self._unit}/s{left}',
      file=self._stream,
      flush=True,
    )

  def close(self) -> None:
    """Removes the bar, if there is one."""
    if self._bar is not None:
      self._bar.close()
