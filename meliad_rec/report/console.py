"""Screen output: progress of a run or of a long pass, and log messages.

Progress is a bar on a terminal and lines elsewhere. Log messages are plain
lines on stderr.
"""

from collections.abc import Mapping
import logging
import sys
import time
from typing import TextIO

from absl import logging as absl_logging

# The metrics that are shown, in this order; metrics.jsonl has all of them.
_SHOWN = {
  'loss_nats_per_token': lambda x: f'loss {x:.4f} nats/token',
  'bits_per_byte': lambda x: f'{x:.4f} bits/byte',
  'word_perplexity': lambda x: f'word perplexity {x:.4g}',
  'accuracy': lambda x: f'accuracy {x:.1%}',
  'error': lambda x: f'error {x:.2%}',
  'learning_rate': lambda x: f'lr {x:.2e}',
  'tokens_per_second': lambda x: f'{x:,.0f} tokens/s',
  'step_seconds': lambda x: f'{1000 * x:.4g} ms/step',
  'mfu': lambda x: f'mfu {x:.1%}',
  'epoch': lambda x: f'epoch {x:.2f}',
  'padding_share': lambda x: f'padding {x:.1%}',
  'halting_depth': lambda x: f'depth {x:.2f}',
  'halting_depth_max': lambda x: f'at most {x:.0f}',
}

_CONTROL = dict.fromkeys((*range(32), *range(127, 160)), '\ufffd')
del _CONTROL[ord('\n')], _CONTROL[ord('\t')]


def printable(text: str) -> str:
  """Replaces control characters, which could change the terminal."""
  return text.translate(_CONTROL)


class Console:
  """Progress of a run.

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
    self._bar = None
    if self._stream.isatty():
      import tqdm

      self._bar = tqdm.tqdm(
        total=total_steps,
        initial=step,
        unit='step',
        file=self._stream,
        dynamic_ncols=True,
      )

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Shows metrics: of training in the bar, of other splits above it."""
    if self._bar is not None:
      self._bar.update(step - self._bar.n)
      if split == 'train':
        loss = values.get('loss_nats_per_token')
        if loss is not None:
          self._bar.set_postfix_str(f'{loss:.4f} nats/token')
        return
    total = f'/{self._total}' if self._total else ''
    width = len(str(self._total or ''))
    shown = '  '.join(
      form(values[name]) for name, form in _SHOWN.items() if name in values
    )
    self.line(f'step {step:>{width}}{total}  {split:<10}  {shown}')

  def line(self, text: str) -> None:
    """Shows text, above the bar if there is one, without control codes."""
    text = printable(text)
    if self._bar is not None:
      self._bar.write(text, file=self._stream)
    else:
      print(text, file=self._stream, flush=True)

  def close(self) -> None:
    """Closes the bar and leaves it on the screen."""
    if self._bar is not None:
      self._bar.close()


def plain() -> None:
  """Formats every log message of the process as a plain line.

  Messages of level INFO from other libraries are dropped. A second call does
  nothing.
  """
  absl_logging.use_absl_handler()
  handler = absl_logging.get_absl_handler()
  handler.setFormatter(_Plain())
  handler.filters = [_is_for_people]


class _Plain(logging.Formatter):
  """Formats as 'message', 'warning: message' or 'error: message'."""

  def format(self, record):
    text = super().format(record)
    if record.levelno <= logging.INFO:
      return text
    return f'{record.levelname.lower()}: {text}'


def _is_for_people(record):
  return record.name == 'absl' or record.levelno > logging.INFO


class Countdown:
  """Progress of a long pass: a bar on a terminal, lines elsewhere.

  Args:
    total: number of units in the whole pass.
    unit: plural name of what is counted, such as 'tokens'.
    every: seconds between lines.
    stream: where to write; None: standard error.
  """

  def __init__(
    self,
    total: int,
    unit: str,
    every: float = 30.0,
    stream: TextIO | None = None,
  ):
    self._stream = stream or sys.stderr
    self._total, self._unit, self._every = total, unit, every
    self._began = self._last = time.monotonic()
    self._bar = None
    if self._stream.isatty():
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
    """Shows that `done` units are done, at most every `every` seconds."""
    if self._bar is not None:
      self._bar.update(done - self._bar.n)
      return
    now = time.monotonic()
    if not done or now - self._last < self._every:
      return
    self._last = now
    rate = done / (now - self._began)
    left = (self._total - done) / rate
    print(
      f'{done:,} of {self._total:,} {self._unit}, {rate:,.0f} {self._unit}/s, '
      f'{left:.0f} s left',
      file=self._stream,
      flush=True,
    )

  def close(self) -> None:
    """Removes the bar."""
    if self._bar is not None:
      self._bar.close()
