"""The life of a run in this process; main_test.py starts and kills others."""

import os
import signal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_rec.data.lanes import ShorterFirst
from meliad_rec.data.synthetic.algorithm import Algorithm
from meliad_rec.evaluation.evaluation import evaluate
from meliad_rec.report import journal
from meliad_rec.storage import step_writer
from meliad_rec.storage.checkpoints import Checkpoints
from meliad_rec.storage.checksums import digest
from meliad_rec.training import trainer
from meliad_rec.training import validation
from meliad_rec.training.experiment import EvalSubset
from meliad_rec.training.program import TrainProgram
from meliad_rec.training.trainer import Run
from tests import bucket
from tests import tiny_run


def start(workdir, data, program=None, experiment=None, **changes):
  """Begins a run of an experiment, or of a new one with these settings."""
  program = program or tiny_run.program()
  experiment = experiment or tiny_run.experiment(data, program, **changes)
  run = Run(experiment, workdir, {})
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


@pytest.fixture(scope='module')
def straight(tmp_path_factory, data):
  """A run that nothing stopped."""
  return whole(tmp_path_factory.mktemp('runs') / 'straight', data)


def assert_same(run, straight):
  assert digest(run.state) == digest(straight.state)
  assert run.position == straight.position
  assert run.progress == straight.progress


def test_a_run_resumes_exactly(tmp_path, data, straight):
  """Stopped once after a step and once within an evaluation."""
  stopped(tmp_path, data, 2)
  run = start(tmp_path, data)
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
  assert_same(whole(tmp_path, data), straight)
  kept = ('step', 'split', 'loss_nats_per_token', 'accuracy', 'epoch')
  folders = straight.workdir, tmp_path
  a, b = (
    [{k: each.get(k) for k in kept} for each in records(folder)]
    for folder in folders
  )
  assert a == b
  a, b = (
    Checkpoints(folder / 'checkpoints', 3, 'bits_per_byte')._scores()
    for folder in folders
  )
  assert a == b


def test_an_evaluation_has_no_more_rows_than_documents(straight):
  *_, last = (
    each for each in records(straight.workdir) if each['split'] == 'validation'
  )
  documents, params = straight.validation.documents, straight.state.params
  padding = [
    evaluate(straight.program, params, documents, rows)['padding_share']
    for rows in (len(documents), straight.experiment.batch)
  ]
  assert last['padding_share'] == pytest.approx(padding[0])
  assert padding[0] < padding[1]


def test_the_average_of_the_parameters_is_evaluated(straight):
  *_, last = (
    each for each in records(straight.workdir) if each['split'] == 'validation'
  )
  assert last['step'] == straight.step
  documents = straight.validation.documents

  def loss(params):
    batch = straight.experiment.batch
    return evaluate(straight.program, params, documents, batch)[
      'loss_nats_per_token'
    ]

  assert loss(straight.state.ema) == pytest.approx(
    last['loss_nats_per_token'], rel=1e-6
  )
  difference = loss(straight.state.params) - last['loss_nats_per_token']
  assert abs(difference) > 1e-4


@pytest.mark.slow
def test_shorter_segments_first(tmp_path, data, straight):
  """The carry continues through the change, also if the run is stopped."""
  first = whole(tmp_path / 'a', data, shorter_first=ShorterFirst(8, 2))
  shorter = {'experiment': first.experiment}  # It has compiled programs.
  assert first.position['tokens'] <= tiny_run.ROWS * (2 * 8 + 4 * 16)
  for stop in (1, 2):
    stopped(tmp_path / 'b', data, stop, **shorter)
  assert_same(whole(tmp_path / 'b', data, **shorter), first)
  assert digest(first.state) != digest(straight.state)


def test_a_finished_run_is_left_as_it_is(data, straight):
  before = records(straight.workdir)
  again = whole(straight.workdir, data)
  assert again.step == straight.step and again.finished
  assert not straight.finished
  assert records(straight.workdir) == before
  goodput = straight.goodput
  for part in 'step', 'data wait', 'evaluation', 'checkpoint':
    assert goodput.seconds[part] > 0
  assert 0 < sum(goodput.seconds.values()) <= goodput.whole


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


def test_a_step_is_dispatched_before_the_last_one_is_read(tmp_path, data):
  spy = Spy(tiny_run.program())
  run = start(tmp_path, data, spy, steps=4, eval_every=9, save_every=9)
  add = run.meter.add
  run.meter.add = lambda *args: spy.calls.append('read') or add(*args)
  run.live()
  assert spy.calls == ['dispatch', *['dispatch', 'read'] * 3, 'read']


def ruin(step, state):
  """Makes the parameters infinite in the update of step 5."""
  if step != 5:
    return state
  return state.replace(params=jax.tree.map(lambda p: p + jnp.inf, state.params))


def failing(message):
  return mock.Mock(side_effect=OSError(message))


def test_a_non_finite_update_is_not_saved(tmp_path, data, caplog):
  """An error while closing does not hide an earlier one, and all is closed."""
  spy = Spy(tiny_run.program(), ruin)
  run = start(tmp_path, data, spy, save_every=5, eval_every=9)
  run.report.close = failing('the disk is full')
  with pytest.raises(ValueError, match='Step 5, after its update,'):
    run.live()
  assert 'the disk is full' in caplog.text
  assert Checkpoints(tmp_path / 'checkpoints').latest() is None
  run = start(tmp_path, data, steps=1)
  run.profile.close, run.report.close = failing('first'), failing('second')
  with pytest.raises(OSError, match='first'):
    run.live()
  assert 'second' in caplog.text
  start(tmp_path, data)


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
  given = iter([{'loss_nats_per_token': 1.0, name: score} for score in scores])
  monkeypatch.setattr(validation, 'evaluate', lambda *_, **__: next(given))


def best(run):
  """Returns the step that the folder of a run holds as the best."""
  folder, experiment = run.workdir / 'checkpoints', run.experiment
  kept = Checkpoints(folder, 1, experiment.best_metric, experiment.best_is)
  return kept.restore(run.program.shapes, 'best')[0]


def test_patience_and_the_best_checkpoint(tmp_path, data, monkeypatch):
  scripted(monkeypatch, [0.1, 0.3, 0.2, 0.25, 0.9], 'accuracy')
  settings = {'eval_every': 1, 'keep': 1, 'patience': 2}
  for _ in range(2):  # Also when it is started again.
    run = start(tmp_path, data, best_metric='accuracy', **settings)
    assert run.live() == '2 evaluations gave no new best'
    assert run.step == 4
  assert Checkpoints(tmp_path / 'checkpoints').steps() == [2, 4]
  assert run.progress.best == 0.3
  assert best(run) == 2


def test_other_validation_documents_restart_the_search(
  tmp_path, data, monkeypatch, caplog
):
  scripted(monkeypatch, [1.0, 2.0, 9.0, 8.0])
  settings = {'eval_every': 1, 'keep': 1, 'patience': 1}
  run = start(tmp_path, data, steps=2, **settings)
  assert run.live() is None
  assert (run.progress.best, run.progress.since_best) == (1.0, 1)
  subset = EvalSubset(documents=2)
  run = start(tmp_path, data, steps=4, eval_subset=subset, **settings)
  assert 'EVAL_DOCUMENTS or EVAL_TOKENS of this run' in caplog.text
  assert run.live() is None
  assert (run.progress.best, run.progress.since_best) == (8.0, 0)
  assert best(run) == 4


def test_a_run_on_labels(tmp_path):
  """Its first steps, of a few words each, score hardly any label."""
  task = Algorithm(programs=30, statements=6, programs_per_document=4)
  settings = {'best_metric': 'accuracy', 'steps': 5}
  stopped(tmp_path, task, 2, **settings)
  run = whole(tmp_path, task, **settings)
  found = [r for r in records(tmp_path) if r['split'] == 'validation']
  assert [r['step'] for r in found] == [3, 5]
  assert run.progress.best == max(r['accuracy'] for r in found)


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


def test_runs_that_cannot_begin(tmp_path, data, straight):
  """They release the folder."""
  other = tiny_run.write_store(tmp_path / 'other', seed=1)
  running = start(tmp_path / 'running', data)
  for workdir, given, changes, named in (
    (straight.workdir, other, {}, 'with other data, 9 documents .random'),
    (straight.workdir, data, {'seed': 7}, 'seed'),
    (straight.workdir, data, {'seed': 7}, 'seed'),
    (running.workdir, data, {}, 'Another training run'),
    ('s3://bucket/run', data, {}, 's3://bucket/run'),
  ):
    with pytest.raises(ValueError, match=named):
      start(workdir, given, **changes)


def test_what_stops_a_run_later_stops_it_before_compiling(
  tmp_path, data, monkeypatch
):
  monkeypatch.setattr(trainer.Run, 'create', lambda _: pytest.fail('too late'))
  (tmp_path / 'a').mkdir()
  (tmp_path / 'a' / journal.NAME).write_text('no JSON\n')
  with pytest.raises(ValueError, match='Line 1 of .* is not a JSON object'):
    start(tmp_path / 'a', data)
  full = mock.Mock(free=100)
  monkeypatch.setattr(step_writer.shutil, 'disk_usage', lambda _: full)
  with pytest.raises(ValueError, match='bytes do not fit into the 100 left'):
    start(tmp_path / 'b', data)


def test_hosts_are_compared(tmp_path, data, straight, monkeypatch):
  found = []
  monkeypatch.setattr(trainer.hosts, 'agree', found.append)
  text = 'c/B = 2\nPATH = "/b"\nA = 1\n'
  Run(straight.experiment, straight.workdir, {'config': text})
  validation = data.documents('validation').identity
  assert found == [
    {
      'tokenizer': 'bytes',
      'data': data.documents('train').identity,
      'validation': validation,
      'validation split': validation,
      'steps an update': '1',
      'code of meliad_rec or jax': '',
      'newest step': '6',
      'settings': 'A = 1\nc/B = 2',
      'use of --init_from': 'False',
    }
  ]
  fill = lambda params: (params, 'step 7 of a run that still trains')
  run = Run(straight.experiment, tmp_path, {}, fill)
  run.create()
  assert found[2:] == [{'--init_from': 'step 7 of a run that still trains'}]


def test_a_run_saves_its_first_parameters_if_a_step_compiles(
  tmp_path, data, monkeypatch
):
  """Otherwise it could not begin again with a smaller batch."""

  def saved():
    fill = lambda params: (params, 'step 7 of another run')
    experiment = tiny_run.experiment(data, tiny_run.program())
    run = Run(experiment, tmp_path, {}, fill)
    try:
      run.begin()
    finally:
      run.checkpoints.close()
      steps.append(run.checkpoints.steps())

  steps = []
  with monkeypatch.context() as patch:
    too_large = mock.PropertyMock(side_effect=MemoryError)
    patch.setattr(TrainProgram, 'train_step', too_large)
    with pytest.raises(MemoryError):
      saved()
  saved()
  assert steps == [[], [0]]


def test_a_run_in_a_bucket_resumes_exactly(
  tmp_path, data, straight, monkeypatch
):
  with bucket.served(tmp_path, monkeypatch):
    stopped('gs://bucket/runs/a', data, 4)
    run = start('gs://bucket/runs/a', data)
    assert run.step == 4
    assert run.live() is None
  assert_same(run, straight)
  far = tmp_path / 'bucket' / 'runs' / 'a'
  found, expected = (
    [(r['step'], r['split']) for r in records(folder)]
    for folder in (far, straight.workdir)
  )
  assert found == expected
  names = {path.name for path in far.iterdir()}
  assert {'checkpoints', 'tensorboard', 'loss_nats_per_token.png'} <= names
