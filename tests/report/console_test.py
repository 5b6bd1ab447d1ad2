"""Lines where there is no terminal, a bar where there is one."""

import io

from meliad_rec.report.console import Console
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
  'halting_left': 0.01,
  'halting_p_1': 0.5,
}


def test_lines_elsewhere():
  out = io.StringIO()
  console = Console(total_steps=500, stream=out)
  console.write(20, 'train', FIGURES)
  console.line('hello')
  console.close()
  assert out.getvalue() == (
    'step  20/500  train       loss 2.3457 nats/token  3.2500 bits/byte  '
    'accuracy 25.3%  error 0.12%  lr 1.23e-03  12,346 tokens/s  12.3 ms/step  '
    'epoch 0.12  padding 1.5%  depth 2.35  at most 7\nhello\n'
  )


def test_a_bar_on_a_terminal():
  out = Terminal()
  console = Console(total_steps=50, step=10, stream=out)
  console.write(20, 'train', {'loss_nats_per_token': 2.3456789})
  console.write(20, 'validation', {'loss_nats_per_token': 3.5})
  console.close()
  shown = out.getvalue()
  assert '10/50' in shown
  assert '20/50' in shown
  assert '2.3457 nats/token' in shown
  assert 'step 20/50  validation  loss 3.5000 nats/token\n' in shown


def test_what_a_model_writes_cannot_steer_the_terminal():
  out = io.StringIO()
  Console(stream=out).line('a\x1b[2Jb\x07\tc\nd\x9b')
  assert printable('a\r\n\tü\x7f') == 'a\ufffd\n\tü\ufffd'
  assert out.getvalue() == 'a\ufffd[2Jb\ufffd\tc\nd\ufffd\n'
