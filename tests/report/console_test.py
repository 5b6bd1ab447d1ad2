"""Progress as lines and as a bar; log messages as plain lines."""

import io
import os
import pathlib
import subprocess
import sys

import numpy as np

from meliad_rec.report import console
from meliad_rec.report.console import Console
from meliad_rec.report.console import Countdown
from meliad_rec.report.console import printable


class Terminal(io.StringIO):
  def isatty(self):
    return True


FIGURES = {
  'loss_nats_per_token': 2.3456789,
  'bits_per_byte': 3.25,
  'accuracy': 0.2534,
  'error': 0.00123,
  'padding_share': 0.015,
  'tokens': 70,
  'learning_rate': 0.00123,
  'gradient_norm': 1.5,
  'tokens_per_second': 12345.6,
  'step_seconds': 0.0123,
  'epoch': 0.125,
  'halting_depth': 2.345,
  'halting_depth_max': 7.0,
  'halting_remainder': 0.01,
}


def test_lines_without_a_terminal():
  out = io.StringIO()
  shown = Console(total_steps=500, stream=out)
  shown.write(20, 'train', FIGURES)
  shown.line('hello')
  shown.close()
  assert out.getvalue() == (
    'step  20/500  train       loss 2.3457 nats/token  3.2500 bits/byte  '
    'accuracy 25.3%  error 0.12%  lr 1.23e-03  12,346 tokens/s  12.3 ms/step  '
    'epoch 0.12  padding 1.5%  depth 2.35  at most 7\nhello\n'
  )


def test_long_steps_are_in_seconds():
  out = io.StringIO()
  Console(stream=out).write(1, 'train', {'step_seconds': 12.345})
  assert out.getvalue().endswith('  12.35 s/step\n')


def test_a_bar_on_a_terminal(monkeypatch):
  out = Terminal()
  shown = Console(total_steps=50, step=10, stream=out)
  monkeypatch.setattr(console.time, 'monotonic', lambda: 1e9)
  shown.tick(20, 2.3456789, lambda: 0.01)
  shown.write(20, 'train', {'loss_nats_per_token': 2.3456789})
  shown.write(20, 'validation', {'loss_nats_per_token': 3.5})
  shown.close()
  text = out.getvalue()
  assert '10/50' in text and '20/50' in text
  assert '2.3457 nats/token, lr 1.00e-02' in text
  assert 'step 20/50  train       loss 2.3457 nats/token\n' in text
  assert 'step 20/50  validation  loss 3.5000 nats/token\n' in text
  out = Terminal()
  counted = Countdown(50, 'tokens', stream=out)
  counted.show(50)
  counted.close()
  assert '0/50.0' in out.getvalue().replace('0.00/', '0/')


def test_lines_appear_at_growing_intervals(monkeypatch):
  """Steps of 1 s: each is shown at first, few of them in the end."""
  now = [0.0]
  monkeypatch.setattr(console.time, 'monotonic', lambda: now[0])
  out = io.StringIO()
  shown = Console(total_steps=1000, stream=out)
  for step in range(1, 1001):
    now[0] += 1
    if step % 10 == 0:
      shown.write(step, 'train', {'loss_nats_per_token': 2.0})
    shown.tick(step, 3.0, lambda: 0.5)
  lines = out.getvalue().splitlines()
  announced = [line for line in lines if line.startswith('A step takes 1 s: ')]
  assert announced == [
    'A step takes 1 s: 996 more steps will take about 17 min, evaluations not '
    'included.'
  ]
  steps = [int(one.split('/')[0].split()[1]) for one in lines if '/' in one]
  steps = [step for step in steps if step > 4]
  gaps = np.diff(steps)
  assert max(gaps[:10]) <= 5 and min(gaps[-10:-1]) >= 15 and steps[-1] == 1000
  assert all('left' in line for line in lines[2:-1])
  assert len(set(steps)) == len(steps)  # Each step has one loss.
  assert all(
    ('loss 3.0000 nats/token in this step' in one) == (int(one[5:9]) % 10 > 0)
    for one in lines
    if '/' in one
  )


def test_a_terminal_without_a_size_has_no_bar(monkeypatch):
  empty = os.terminal_size((0, 0))
  monkeypatch.setattr(console.os, 'get_terminal_size', lambda _: empty)
  out = Terminal()
  monkeypatch.setattr(out, 'fileno', lambda: 1)
  shown = Console(total_steps=50, stream=out)
  shown.write(20, 'train', {'loss_nats_per_token': 2.3456789})
  shown.close()
  assert out.getvalue() == 'step 20/50  train       loss 2.3457 nats/token\n'


def test_control_codes_are_not_shown():
  out = io.StringIO()
  Console(stream=out).line('a\x1b[2Jb\x07\tc\nd\x9b')
  assert printable('a\r\n\tü\x7f') == 'a\ufffd\n\tü\ufffd'
  assert out.getvalue() == 'a\ufffd[2Jb\ufffd\tc\nd\ufffd\n'


def test_a_countdown_is_a_line_now_and_then(monkeypatch):
  now = [100.0]
  monkeypatch.setattr(console.time, 'monotonic', lambda: now[0])
  out = io.StringIO()
  shown = Countdown(5000, 'tokens', every=10, stream=out)
  for seconds, done in ((4, 900), (10, 1000), (15, 1200), (20, 4000)):
    now[0] = 100 + seconds
    shown.show(done)
  shown.close()
  assert out.getvalue().splitlines() == [
    '1,000 of 5,000 tokens, 100 tokens/s, 40 s left',
    '4,000 of 5,000 tokens, 200 tokens/s, 5 s left',
  ]


ROOT = pathlib.Path(__file__).parents[2]
CODE = """
import logging
from absl import app
from absl import logging as absl_logging
from meliad_rec.report import console

def main(_):
  console.use_plain_logs()
  console.use_plain_logs()
  absl_logging.info('Going on from step %d.', 7)
  absl_logging.error('It is damaged.')
  logging.getLogger('matplotlib').info('generated new fontManager')
  logging.getLogger('jax').warning('slow')

app.run(main)
"""


def test_messages_are_plain_lines():
  done = subprocess.run(
    [sys.executable, '-c', CODE],
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    cwd='/',
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.stderr == (
    'Going on from step 7.\nerror: It is damaged.\nwarning: slow\n'
  )


def test_durations():
  times = {89: '89 s', 5340: '89 min', 12_000: '3 h 20 min'}
  times[190 * 3600] = '7 d 22 h'
  assert {s: console.duration(s) for s in times} == times
