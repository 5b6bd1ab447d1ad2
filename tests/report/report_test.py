"""Metrics in metrics.jsonl, TensorBoard and on the screen; resuming."""

import io
import struct

import jax
import pytest
from tensorboardX.proto import event_pb2

from meliad_rec.report import journal
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


def journal_of(workdir):
  return [
    (record['step'], record.get('split', 'text'))
    for record in journal.read(workdir / journal.NAME)
  ]


def test_metrics_go_to_all_three_places(tmp_path):
  out = io.StringIO()
  report = Report(tmp_path / 'run', total_steps=9, stream=out)
  report.write(2, {'accuracy': 0.5})
  report.write(2, {'accuracy': 0.25}, 'validation')
  report.text(2, 'sample', 'once\nupon')
  report.close()
  boards = tmp_path / 'run/tensorboard'
  records = journal.read(tmp_path / 'run' / journal.NAME)
  assert records[0].pop('time') > 1.7e9
  assert records[0] == {'step': 2, 'split': 'train', 'accuracy': 0.5}
  assert records[2] == {'step': 2, 'text': {'sample': 'once\nupon'}}
  assert scalars(boards / 'train') == [(2, 'accuracy', 0.5)]
  assert scalars(boards / 'validation') == [(2, 'accuracy', 0.25)]
  (text,) = [e for e in events(boards / 'text') if e.summary.value]
  assert b'    once\n    upon' in text.summary.value[0].tensor.string_val[0]
  assert 'step 2/9  validation  accuracy 25.0%' in out.getvalue()
  assert 'once\nupon' in out.getvalue()


def test_a_resumed_run_has_each_step_once(tmp_path):
  killed = Report(tmp_path, stream=io.StringIO())
  for step in 1, 2, 3, 4:
    killed.write(step, {'accuracy': 0.0})
  out = io.StringIO()
  resumed = Report(tmp_path, resume_step=2, stream=out)
  for step in 3, 4, 5:
    resumed.write(step, {'accuracy': 1.0})
  resumed.close()
  assert journal_of(tmp_path) == [(s, 'train') for s in (1, 2, 3, 4, 5)]
  assert 'Dropped 2 lines' in out.getvalue()
  starts = [
    event.step
    for event in events(tmp_path / 'tensorboard/train')
    if event.HasField('session_log')
  ]
  assert starts == [3]


@pytest.mark.parametrize('resume_step, kept', [(None, 3), (0, 1)])
def test_from_the_start_or_adding(tmp_path, resume_step, kept):
  first = Report(tmp_path, stream=io.StringIO())
  first.write(0, {'accuracy': 0.0}, 'validation')
  first.write(1, {'accuracy': 0.0})
  first.close()
  second = Report(tmp_path, resume_step=resume_step, stream=io.StringIO())
  second.write(0, {'accuracy': 0.0}, 'validation')
  second.close()
  assert len(journal_of(tmp_path)) == kept


def test_any_metric_is_plotted(tmp_path):
  report = Report(tmp_path, stream=io.StringIO())
  report.write(1, {'loss_nats_per_token': 2.0, 'error': 0.5})
  report.write(1, {'error': 0.75}, 'trivial/guess')
  report.plot()
  report.plot('error')
  report.close()
  drawn = {path.name for path in tmp_path.glob('*.png')}
  assert drawn == {'error.png', 'loss_nats_per_token.png'}
  board = tmp_path / 'tensorboard' / 'trivial' / 'guess'
  assert scalars(board) == [(1, 'error', 0.75)]


def test_only_the_first_host_writes(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  report = Report(tmp_path / 'run', resume_step=3)
  report.write(4, {'accuracy': 0.5})
  report.text(4, 'sample', 'x')
  report.plot()
  report.close()
  assert not (tmp_path / 'run').exists()
