"""Metrics in metrics.jsonl, TensorBoard and on the screen; resuming."""

import io
import struct
from unittest import mock

import jax
import pytest
from tensorboardX.proto import event_pb2

from meliad_rec.report import journal
from meliad_rec.report import plot
from meliad_rec.report.report import Report


def events(folder):
  """Yields every TensorBoard event of a folder, in order of writing."""
  for file in sorted(folder.iterdir()):
    data = file.read_bytes()
    while data:
      (size,) = struct.unpack('<Q', data[:8])
      yield event_pb2.Event.FromString(data[12 : 12 + size])
      data = data[16 + size :]


def scalars(folder):
  return [
    (event.step, value.tag, value.simple_value)
    for event in events(folder)
    for value in event.summary.value
  ]


def steps(workdir):
  return [record['step'] for record in journal.read(workdir / journal.NAME)]


def test_metrics_go_to_all_three_places(tmp_path):
  out = io.StringIO()
  report = Report(tmp_path / 'run', 0, total_steps=9, stream=out)
  report.write(2, {'accuracy': 0.5})
  report.write(2, {'accuracy': 0.25}, 'validation')
  report.text(2, 'sample', 'once\nupon')
  report.write(1, {'error': 0.75}, 'trivial/guess')
  report.plot('error')
  report.close()
  boards = tmp_path / 'run/tensorboard'
  records = journal.read(tmp_path / 'run' / journal.NAME)
  assert records[0].pop('time') > 1.7e9
  assert records[0] == {'step': 2, 'split': 'train', 'accuracy': 0.5}
  assert records[2] == {'step': 2, 'text': {'sample': 'once\nupon'}}
  assert scalars(boards / 'train') == [(2, 'accuracy', 0.5)]
  assert scalars(boards / 'validation') == [(2, 'accuracy', 0.25)]
  assert scalars(boards / 'trivial' / 'guess') == [(1, 'error', 0.75)]
  assert (tmp_path / 'run' / 'error.png').exists()
  (text,) = [e for e in events(boards / 'text') if e.summary.value]
  assert b'    once\n    upon' in text.summary.value[0].tensor.string_val[0]
  assert 'step 2/9  validation  accuracy 25.0%' in out.getvalue()
  assert 'once\nupon' in out.getvalue()


def test_a_resumed_run_has_each_step_once(tmp_path):
  killed = Report(tmp_path, 0, stream=io.StringIO())
  for step in 1, 2, 3, 4:
    killed.write(step, {'accuracy': 0.0})
  out = io.StringIO()
  resumed = Report(tmp_path, resume_step=2, stream=out)
  for step in 3, 4, 5:
    resumed.write(step, {'accuracy': 1.0})
  resumed.close()
  assert steps(tmp_path) == [1, 2, 3, 4, 5]
  assert 'Dropped 2 lines' in out.getvalue()
  found = events(tmp_path / 'tensorboard/train')
  assert [e.step for e in found if e.HasField('session_log')] == [0, 3]


def test_lines_of_lost_checkpoints_are_put_aside(tmp_path):
  for _ in range(3):
    report = Report(tmp_path, resume_step=0, stream=io.StringIO())
    report.write(0, {'accuracy': 0.0}, 'validation')
    report.write(1, {'accuracy': 0.0})
    report.close()
    assert steps(tmp_path) == [0, 1]
  old = journal.read(tmp_path / journal.OLD)
  assert [record['step'] for record in old] == [0, 1, 0, 1]


def test_a_full_disk_only_delays_the_lines(tmp_path, monkeypatch, caplog):
  """RLIMIT_FSIZE makes writes fail, as on a full disk."""
  resource = pytest.importorskip('resource')
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  report = Report(tmp_path, 0, stream=io.StringIO())
  report.write(1, {'accuracy': 0.0})
  full = mock.Mock(side_effect=OSError(28, 'No space left'))
  resource.setrlimit(resource.RLIMIT_FSIZE, (150, limits[1]))
  monkeypatch.setattr(plot, 'plot', full)
  try:
    for step in range(2, 40):  # More than the queue of a thread holds.
      report.write(step, {'accuracy': 0.0})
      report.plot('accuracy')
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert len(steps(tmp_path)) < 5
  assert caplog.text.count('metrics.jsonl cannot be written') == 1
  assert caplog.text.count('The plot of accuracy was not drawn') == 1
  report.sync()
  assert steps(tmp_path) == list(range(1, 40))
  board = scalars(tmp_path / 'tensorboard/train')
  assert [step for step, *_ in board] == list(range(1, 40))
  report.close()


def test_all_is_closed_even_if_the_screen_fails(tmp_path, monkeypatch):
  report = Report(tmp_path, 0, stream=io.StringIO())
  report.write(1, {'accuracy': 0.0})
  closed = []
  monkeypatch.setattr(report._journal, 'close', lambda: closed.append(1))
  monkeypatch.setattr(report._console, 'close', lambda: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    report.close()
  assert closed


def test_only_the_first_host_writes(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  report = Report(tmp_path / 'run', resume_step=3)
  report.write(4, {'accuracy': 0.5})
  report.text(4, 'sample', 'x')
  report.plot()
  report.close()
  assert not (tmp_path / 'run').exists()
