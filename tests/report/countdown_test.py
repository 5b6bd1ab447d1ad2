"""Lines come now and then, and say how long it still takes."""

import io

from meliad_rec.report import console
from meliad_rec.report.console import Countdown


def test_a_line_each_so_often(monkeypatch):
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


def test_a_bar_on_a_terminal(monkeypatch):
  out = io.StringIO()
  monkeypatch.setattr(out, 'isatty', lambda: True)
  shown = Countdown(50, 'tokens', stream=out)
  shown.show(50)
  shown.close()
  assert '0/50.0' in out.getvalue().replace('0.00/', '0/')
