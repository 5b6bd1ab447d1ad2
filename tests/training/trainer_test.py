"""The life of a run in this process; main_test.py starts and kills others."""

import logging
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.data.lanes import ShorterFirst
from meliad_rec.data.synthetic.algorithm import Algorithm
from meliad_rec.report import journal
from meliad_rec.storage.checkpoints import Checkpoints
from meliad_rec.storage.checksums import digest
from meliad_rec.training import trainer
from meliad_rec.training import validation
from meliad_rec.training.experiment import Part
from meliad_rec.training.trainer import Run
from tests import bucket
from tests import tiny_run


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  return tiny_run.write_store(tmp_path_factory.mktemp('data') / 'store')


def start(workdir, data, program=None, **changes):
  program = program or tiny_run.program()
  run = Run(tiny_run.experiment(data, program, **changes), workdir, {})
  run.begin()
  return run


def whole(workdir, data, **changes):
  run = start(workdir, data, **changes)
  assert run.live() is None
  return run


def stopped(workdir, data, at, **changes):
  """Returns a run that was asked to stop after a step."""
  run = start(workdir, data, **changes)
  run.checkpoints.preempted = lambda: run.step == at
  assert run.live() == 'it was asked to stop'
  assert run.step == at
  return run


def records(workdir):
  return journal.read(workdir / journal.NAME)


def test_a_run_resumes_exactly(tmp_path, data):
  """Stopped once after a step and once within an evaluation."""
  straight = whole(tmp_path / 'a', data)
  stopped(tmp_path / 'b', data, 2)
  run = start(tmp_path / 'b', data)
  asked = []

  def preempted():
    """True within the evaluation after step 3."""
    if run.step == 3:
      asked.append(run.step)
    return len(asked) > 1

  run.checkpoints.preempted = preempted
  assert run.live() == 'it was asked to stop'
  assert run.step == 3
  assert run.progress.evaluated == 0
  run = whole(tmp_path / 'b', data)
  assert digest(run.state) == digest(straight.state)
  assert run.position == straight.position
  assert run.progress == straight.progress
  kept = ('step', 'split', 'loss_nats_per_token', 'accuracy', 'epoch')
  reported = [
    [{k: each.get(k) for k in kept} for each in records(tmp_path / name)]
    for name in ('a', 'b')
  ]
  assert reported[0] == reported[1]
  folders = tmp_path / 'a' / 'checkpoints', tmp_path / 'b' / 'checkpoints'
  a, b = (Checkpoints(f, 3, 'bits_per_byte')._scores() for f in folders)
  assert a == b


def test_shorter_segments_first(tmp_path, data):
  """The carry continues through the change, also if the run is stopped."""
  shorter = {'shorter_first': ShorterFirst(8, 2)}
  straight = whole(tmp_path / 'a', data, **shorter)
  assert straight.position['tokens'] <= tiny_run.ROWS * (2 * 8 + 4 * 16)
  for stop in (1, 2, 3):
    stopped(tmp_path / 'b', data, stop, **shorter)
  run = whole(tmp_path / 'b', data, **shorter)
  assert digest(run.state) == digest(straight.state)
  assert digest(run.state) != digest(whole(tmp_path / 'c', data).state)


def test_a_finished_run_is_left_as_it_is(tmp_path, data):
  first = whole(tmp_path, data)
  before = records(tmp_path)
  assert whole(tmp_path, data).step == first.step
  assert records(tmp_path) == before


class Spy:
  """A program that records its steps, and may change their state."""

  def __init__(self, program, spoil=lambda step, state: state):
    self.program, self.spoil, self.calls = program, spoil, []

  def __getattr__(self, name):
    return getattr(self.program, name)

  def train_step(self, state, batch):
    self.calls.append('dispatch')
    state, sums = self.program.train_step(state, batch)
    return self.spoil(int(state.step), state), sums


def test_a_step_is_dispatched_before_the_last_one_is_read(
  tmp_path, data, monkeypatch
):
  spy = Spy(tiny_run.program())
  run = start(tmp_path, data, spy, steps=4, eval_every=9, save_every=9)
  add = run.meter.add
  monkeypatch.setattr(
    run.meter, 'add', lambda sums: spy.calls.append('read') or add(sums)
  )
  run.live()
  assert spy.calls == ['dispatch', *['dispatch', 'read'] * 3, 'read']


def ruin(step, state):
  """Makes the parameters infinite in the update of step 5."""
  if step != 5:
    return state
  return state.replace(params=jax.tree.map(lambda p: p + jnp.inf, state.params))


def test_a_non_finite_update_is_not_saved(tmp_path, data):
  spy = Spy(tiny_run.program(), ruin)
  run = start(tmp_path, data, spy, save_every=5, eval_every=9)
  with pytest.raises(ValueError, match='Step 5, after its update,'):
    run.live()
  assert Checkpoints(tmp_path / 'checkpoints').latest() is None


def test_a_non_finite_loss_is_reported_and_ends_the_run(tmp_path, data):
  spy = Spy(tiny_run.program(), ruin)
  run = start(tmp_path, data, spy, save_every=2, eval_every=9, steps=9)
  with pytest.raises(ValueError, match=r'Step 6 has loss nan .* \d+:\d+, '):
    run.live()
  assert Checkpoints(tmp_path / 'checkpoints').latest() == 4
  last = records(tmp_path)[-1]
  assert last['step'] == 6
  assert np.isnan(last['loss_nats_per_token'])


def scripted(monkeypatch, scores, name='bits_per_byte'):
  """Replaces evaluations by given scores."""
  left = iter(scores)
  monkeypatch.setattr(
    validation,
    'evaluate',
    lambda *_: {'loss_nats_per_token': 1.0, name: next(left)},
  )


def test_patience_and_the_best_checkpoint(tmp_path, data, monkeypatch):
  scripted(monkeypatch, [3.0, 2.0, 2.5, 2.25, 1.0])
  settings = {'steps': 9, 'eval_every': 1, 'keep': 1, 'patience': 2}
  run = start(tmp_path, data, **settings)
  assert run.live() == '2 evaluations gave no new best'
  assert run.step == 4
  checkpoints = Checkpoints(tmp_path / 'checkpoints', 1, 'bits_per_byte')
  assert checkpoints.steps() == [2, 4]
  assert checkpoints.restore(run.program.shapes, 'best')[0] == 2
  run = start(tmp_path, data, **settings)
  assert run.live() == '2 evaluations gave no new best'
  assert run.step == 4


def test_the_highest_accuracy_is_best(tmp_path, data, monkeypatch):
  scripted(monkeypatch, [0.1, 0.3, 0.2], 'accuracy')
  settings = {'steps': 3, 'eval_every': 1, 'best_metric': 'accuracy'}
  run = whole(tmp_path, data, **settings)
  assert run.progress.best == 0.3
  checkpoints = Checkpoints(
    tmp_path / 'checkpoints', 3, 'accuracy', run.experiment.best_is
  )
  assert checkpoints.restore(run.program.shapes, 'best')[0] == 2


def test_a_run_on_labels_resumes_exactly(tmp_path):
  """Its initial steps, of a few words each, score hardly any label."""
  task = Algorithm(programs=30, statements=6, programs_per_document=4)
  settings = {'best_metric': 'accuracy', 'steps': 5}
  straight = whole(tmp_path / 'a', task, **settings)
  stopped(tmp_path / 'b', task, 2, **settings)
  run = whole(tmp_path / 'b', task, **settings)
  assert digest(run.state) == digest(straight.state)
  assert run.progress == straight.progress
  found = [r for r in records(tmp_path / 'b') if r['split'] == 'validation']
  assert [r['step'] for r in found] == [3, 5]
  assert run.progress.best == max(r['accuracy'] for r in found)


def test_other_data_is_refused(tmp_path, data):
  whole(tmp_path / 'run', data, steps=1)
  other = tiny_run.write_store(tmp_path / 'other', seed=1)
  with pytest.raises(ValueError, match='data'):
    start(tmp_path / 'run', other, steps=2)
  assert Checkpoints(tmp_path / 'run' / 'checkpoints').latest() == 1


def test_a_damaged_checkpoint_is_skipped_loudly(tmp_path, data, caplog):
  whole(tmp_path, data, steps=4)
  (tmp_path / 'checkpoints' / '4' / 'MANIFEST.json').unlink()
  with caplog.at_level(logging.ERROR):
    run = start(tmp_path, data, steps=4)
  assert run.step == 3
  assert 'Using step 3 in place of [4]' in caplog.text


def test_a_signal_ends_the_run_with_its_exit_code(tmp_path, data):
  def ask(step, state):
    if step == 2:
      os.kill(os.getpid(), signal.SIGTERM)
    return state

  run = start(tmp_path, data, Spy(tiny_run.program(), ask))
  assert run.live() == 'it was asked to stop'
  assert run.checkpoints.exit_code == 143
  assert Checkpoints(tmp_path / 'checkpoints').latest() == run.step < 6
  run = whole(tmp_path, data)
  assert run.checkpoints.exit_code == 0


def failing(message):
  def close():
    raise OSError(message)

  return close


def test_an_error_while_closing_does_not_hide_an_earlier_one(
  tmp_path, data, monkeypatch, caplog
):
  """All parts are closed, so that the run can start again."""
  spy = Spy(tiny_run.program(), ruin)
  run = start(tmp_path, data, spy, save_every=5, eval_every=9)
  monkeypatch.setattr(run.report, 'close', failing('the disk is full'))
  with pytest.raises(ValueError, match='Step 5'):
    run.live()
  assert 'the disk is full' in caplog.text
  run = start(tmp_path, data, steps=1)
  monkeypatch.setattr(run.profile, 'close', failing('first'))
  monkeypatch.setattr(run.report, 'close', failing('second'))
  with pytest.raises(OSError, match='first'):
    run.live()
  assert 'second' in caplog.text
  start(tmp_path, data)


def test_two_trainings_in_one_folder_are_refused(tmp_path, data):
  first = start(tmp_path, data, steps=2)
  with pytest.raises(ValueError, match='is running'):
    start(tmp_path, data, steps=2)
  first.live()
  whole(tmp_path, data, steps=3)


def test_a_run_with_another_order_of_documents_cannot_begin(tmp_path, data):
  """It releases the folder."""
  whole(tmp_path, data, steps=1)
  for _ in range(2):
    with pytest.raises(ValueError, match='seed'):
      start(tmp_path, data, steps=2, seed=7)


def test_an_address_is_no_folder(data):
  with pytest.raises(ValueError, match='s3://bucket/run'):
    start('s3://bucket/run', data)


def test_goodput(tmp_path, data):
  goodput = whole(tmp_path, data).goodput
  for part in 'step', 'data wait', 'evaluation', 'checkpoint':
    assert goodput.seconds[part] > 0
  assert 0 < sum(goodput.seconds.values()) <= goodput.whole


def test_hosts_are_compared(tmp_path, data, monkeypatch):
  whole(tmp_path, data, steps=1)
  found = []
  monkeypatch.setattr(trainer.hosts, 'agree', found.append)
  start(tmp_path, data)
  assert found == [
    {
      'tokenizer': 'bytes',
      'data': data.documents('train').identity,
      'validation': data.documents('validation').identity,
      'validation split': data.documents('validation').identity,
      'steps an update': '1',
      'newest step': '1',
    }
  ]


def test_other_validation_documents_restart_the_search(
  tmp_path, data, monkeypatch, caplog
):
  scripted(monkeypatch, [1.0, 2.0, 9.0, 8.0])
  settings = {'eval_every': 1, 'keep': 1}
  run = start(tmp_path, data, steps=2, patience=1, **settings)
  assert run.live() is None
  assert (run.progress.best, run.progress.since_best) == (1.0, 1)
  part = Part(documents=2)
  run = start(tmp_path, data, steps=4, patience=1, part=part, **settings)
  assert 'validation data of this run' in caplog.text
  assert run.live() is None
  assert (run.progress.best, run.progress.since_best) == (8.0, 0)
  checkpoints = Checkpoints(tmp_path / 'checkpoints', 1, 'bits_per_byte')
  assert checkpoints.restore(run.program.shapes, 'best')[0] == 4


@pytest.mark.slow
def test_saved_on_eight_devices_and_resumed_on_fewer(tmp_path, data):
  eight = tiny_run.program(8, 2, 2)
  first = start(tmp_path, data, eight, steps=2, eval_every=9)
  first.live()
  for devices, fsdp, model in (4, 2, 2), (2, 2, 1), (1, 1, 1):
    fewer = tiny_run.program(devices, fsdp, model, rows=8)
    checkpoints = Checkpoints(tmp_path / 'checkpoints')
    _, state, _, _ = checkpoints.restore(fewer.shapes)
    assert digest(state) == digest(first.state)
    checkpoints.close()
  run = start(tmp_path, data, fewer, steps=4, eval_every=9)
  assert run.step == 2
  assert run.live() is None
  here = start(tmp_path / 'here', data, fewer, steps=4, eval_every=9)
  here.live()
  found, expected = (
    [r['loss_nats_per_token'] for r in records(w) if r['split'] == 'train']
    for w in (tmp_path, tmp_path / 'here')
  )
  assert found == pytest.approx(expected, rel=1e-4)


def test_a_run_in_a_bucket_resumes_exactly(tmp_path, data, monkeypatch):
  straight = whole(tmp_path / 'here', data)
  with bucket.served(tmp_path, monkeypatch):
    stopped('gs://bucket/runs/a', data, 4)
    run = start('gs://bucket/runs/a', data)
    assert run.step == 4
    assert run.live() is None
  assert digest(run.state) == digest(straight.state)
  far = tmp_path / 'bucket' / 'runs' / 'a'
  found = [(r['step'], r['split']) for r in records(far)]
  assert found == [(r['step'], r['split']) for r in records(tmp_path / 'here')]
  names = {path.name for path in far.iterdir()}
  assert {'checkpoints', 'tensorboard', 'loss_nats_per_token.png'} <= names
