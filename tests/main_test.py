"""The training command, as a person sees it: each test starts processes."""

import pathlib
import random
import re
import signal
import socket
import subprocess
from unittest import mock

import numpy as np
import pytest

from meliad_rec import main
from meliad_rec.report import journal
from tests import tiny_run

SETTINGS = (
  ('STEPS', 120),
  ('EVAL_EVERY', 25),
  ('SAVE_EVERY', 7),
  ('DROPOUT', 0.1),
  ('optimizer.chain.every', 2),
  ('experiment.Experiment.ema_decay', 0.9),
)


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  folder = tmp_path_factory.mktemp('data') / 'store'
  tiny_run.write_store(folder)
  return folder


def test_an_old_configuration_that_cannot_be_read_stops_nothing(
  tmp_path, caplog
):
  old = tmp_path / 'config.gin'
  old.write_text('A = 1\n')
  main.tell_changes(old, 'A = 2\n')
  assert 'changed since the run began: A was 1 and is 2' in caplog.text
  for content in (b'A = (', b'A = "\xe9"'):
    caplog.clear()
    old.write_bytes(content)
    main.tell_changes(old, 'A = 2\n')
    assert 'cannot be compared: ' in caplog.text
    assert caplog.text.count('\n') == 1


@pytest.fixture(scope='module')
def whole(tmp_path_factory, data):
  """A run that nothing stopped: its folder and what it said."""
  workdir = tmp_path_factory.mktemp('runs') / 'whole'
  arguments = tiny_run.command(workdir, data, *SETTINGS)
  arguments.append('--profile=10:12')
  done = tiny_run.run(arguments, JAX_LOG_COMPILES='1')
  assert done.returncode == 0, done.stderr
  return workdir, done


def digests(output):
  """The lines of sha256 at the end of a run."""
  lines = [line for line in output.splitlines() if ' sha256 ' in line]
  assert len(lines) == 5
  return lines


def figures(workdir):
  """{(step, split): loss} of a run; each step occurs once."""
  records = journal.read(workdir / journal.NAME)
  found = {
    (each['step'], each['split']): each['loss_nats_per_token']
    for each in records
    if 'split' in each
  }
  assert len(found) == sum('split' in each for each in records)
  return found


def stop(workdir, data, number, at):
  """Starts or goes on with a run, and sends it a signal at a step."""
  child = subprocess.Popen(
    tiny_run.command(workdir, data, *SETTINGS),
    env=tiny_run.environment(),
    cwd='/',
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  for line in child.stdout:
    if re.match(rf'step +{at}/', line):
      child.send_signal(number)
      break
  output, errors = child.communicate(timeout=600)
  return child.returncode, output, errors


def test_a_run_stopped_any_way_ends_as_one_never_stopped(tmp_path, data, whole):
  """kill -9, then SIGTERM, each at a random step, with batches in flight.

  With dropout, an average of the weights, gradients accumulated over two steps,
  and evaluations before and after each stop.
  """
  kill, term = random.randint(20, 45), random.randint(55, 100)
  code, _, _ = stop(tmp_path, data, signal.SIGKILL, kill)
  assert code == -signal.SIGKILL
  code, output, errors = stop(tmp_path, data, signal.SIGTERM, term)
  assert code == 143, errors
  assert 'Resuming from step' in errors
  assert 'Stopped at step' in output, (kill, term)
  arguments = tiny_run.command(tmp_path, data, *SETTINGS)
  done = tiny_run.run(arguments)
  assert done.returncode == 0, done.stderr
  assert digests(done.stdout) == digests(whole[1].stdout), (kill, term)
  assert figures(tmp_path) == figures(whole[0])


def test_the_training_step_is_compiled_once_and_its_state_donated(whole):
  _, done = whole
  assert done.stderr.count('Finished XLA compilation of jit(train_step)') == 1
  assert done.stderr.count('Finished XLA compilation of jit(eval_step)') == 1
  assert 'donated' not in done.stderr


def test_what_a_run_leaves(whole):
  workdir, done = whole
  names = {path.name for path in workdir.iterdir()}
  assert names == {
    *('checkpoints', 'config.gin', 'run.json', 'metrics.jsonl', 'tensorboard'),
    *('loss_nats_per_token.png', '.lock', 'profile'),
  }
  steps = {step for step, split in figures(workdir) if split == 'train'}
  assert steps == set(range(1, 121))
  assert done.stdout.splitlines()[-1].startswith('Finished step 120 after')


def test_where_its_time_went_and_what_was_traced(whole):
  workdir, done = whole
  shares = re.search(r'^Time: (.*), of \d+ s\.$', done.stderr, re.M)[1]
  parts = dict(each.split('% ')[::-1] for each in shares.split(', '))
  names = 'step', 'compile', 'data wait', 'evaluation', 'checkpoint', 'other'
  assert tuple(parts) == names
  assert sum(map(float, parts.values())) == pytest.approx(100, abs=0.5)
  (trace,) = (workdir / 'profile').rglob('*.xplane.pb')
  assert 'The trace for XProf is in' in done.stderr
  assert trace.stat().st_size > 10_000


def refused(done):
  """The one sentence of a command that refused."""
  assert done.returncode == 2, done.stderr
  last = done.stderr.splitlines()[-1]
  assert last.startswith('error: ')
  assert 'Traceback' not in done.stderr
  return last


@pytest.mark.parametrize(
  'changed, said',
  [
    ({'STORE': 'other'}, 'was trained with data'),
    ({'MLP_DIM': 24}, r'mlp/\S+ with shape'),
    ({'BATCH': 4}, 'with shape'),
    ({'optimizer.chain.rule': '@optimizer.adamw'}, 'opt_state'),
  ],
)
@pytest.mark.slow
def test_another_experiment_in_the_folder_is_refused_and_nothing_lost(
  data, whole, changed, said, tmp_path
):
  workdir, _ = whole
  if 'STORE' in changed:
    tiny_run.write_store(tmp_path / 'other', seed=1)
    changed = {'STORE': repr(str(tmp_path / 'other'))}
  before = contents(workdir)
  settings = dict(SETTINGS) | changed
  done = tiny_run.run(tiny_run.command(workdir, data, *settings.items()))
  assert re.search(said, refused(done))
  assert contents(workdir) == before


def contents(folder: pathlib.Path):
  return {
    path: path.read_bytes() for path in folder.rglob('*') if path.is_file()
  }


@pytest.mark.slow
def test_settings_that_may_change_are_told_and_a_damaged_step_passed_over(
  tmp_path, data, whole
):
  few = dict(SETTINGS) | {'STEPS': 14}
  first = tiny_run.run(tiny_run.command(tmp_path, data, *few.items()))
  assert first.returncode == 0, first.stderr
  largest = max(
    (tmp_path / 'checkpoints' / '14' / 'state').rglob('*'),
    key=lambda path: path.stat().st_size if path.is_file() else 0,
  )
  damaged = bytearray(largest.read_bytes())
  damaged[len(damaged) // 2] ^= 1
  largest.write_bytes(damaged)
  more = few | {'STEPS': 16}
  done = tiny_run.run(tiny_run.command(tmp_path, data, *more.items()))
  assert done.returncode == 0, done.stderr
  assert re.search('error: Step 14 of .* is damaged', done.stderr)
  assert 'error: Using step 7 in place of [14].' in done.stderr
  assert 'STEPS was 14 and is 16' in done.stderr
  assert (tmp_path / 'checkpoints' / '14.corrupt').is_dir()
  assert 'STEPS = 16' in (tmp_path / 'config.gin').read_text()
  start = figures(whole[0])
  for key, loss in figures(tmp_path).items():
    if key[1] == 'train':
      assert loss == start[key]


def test_a_disk_that_fails_is_no_mistake_of_a_setting(tmp_path, monkeypatch):
  """Exit code 2 would tell launchers not to start the run again."""

  class Run:
    def __init__(self, *_):
      self.workdir, self.step = tmp_path, 0

    def begin(self):
      pass

    def live(self):
      raise OSError(116, 'Stale file handle', 'metrics.jsonl')

  monkeypatch.setattr(main.trainer, 'Run', Run)
  monkeypatch.setattr(main.folder, 'write', lambda *_: None)
  monkeypatch.setattr(main.config, 'operative', str)
  with pytest.raises(OSError, match='Stale') as told:
    main.train(mock.Mock(), tmp_path)
  assert told.value.exit_code == 1


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, data):
  changed = {'LEARNING_RATE': 1e30, 'SAVE_EVERY': 1}
  settings = dict(SETTINGS) | changed
  done = tiny_run.run(tiny_run.command(tmp_path, data, *settings.items()))
  said = re.search(
    r'Step (\d+).* has loss (nan|inf).* on the batch of document:token \d+:\d+',
    refused(done),
  )
  step = int(said[1])
  records = journal.read(tmp_path / journal.NAME)
  assert max(each['step'] for each in records) == step
  saved = {
    int(path.name)
    for path in (tmp_path / 'checkpoints').iterdir()
    if path.name.isdecimal()
  }
  assert saved
  assert max(saved) < step


@pytest.mark.slow
def test_a_dry_run_tells_all_and_writes_nothing(tmp_path, data):
  arguments = tiny_run.command(tmp_path / 'run', data, *SETTINGS)
  done = tiny_run.run([*arguments, '--dry_run'])
  assert done.returncode == 0, done.stderr
  assert 'STEPS = 120' in done.stdout
  assert re.search(r'embed/embedding +\(259, 16\) +4,144', done.stdout)
  assert re.search(r'memory per device.* MiB state', done.stdout)
  assert 'train: 9 documents, 1,062 tokens' in done.stdout
  assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_axes_of_the_mesh_are_a_flag(tmp_path, data):
  arguments = tiny_run.command(tmp_path / 'run', data, *SETTINGS)
  done = tiny_run.run([*arguments, '--dry_run', '--mesh=fsdp:1'])
  assert done.returncode == 0, done.stderr
  assert 'partition.make_mesh.fsdp = 1' in done.stdout
  done = tiny_run.run([*arguments, '--dry_run', '--mesh=model:2'])
  assert done.returncode == 2
  assert 'needs 2 devices; there are 1. Give --mesh' in done.stderr


def two_hosts(workdir, datas, settings):
  """Both processes of a run on two hosts of one device each, finished."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  children = [
    subprocess.Popen(
      tiny_run.command(workdir, datas[index], *settings.items()),
      env=tiny_run.environment(
        JAX_COORDINATOR_ADDRESS=address,
        JAX_NUM_PROCESSES='2',
        JAX_PROCESS_ID=str(index),
      ),
      cwd='/',
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for index in (0, 1)
  ]
  return [child.communicate(timeout=600) for child in children]


@pytest.mark.slow
def test_two_processes_give_the_loss_of_one(tmp_path, data):
  """Also when they go on, with a sample: pytest -m slow tests/main_test.py"""
  settings = dict(SETTINGS) | {'EVAL_EVERY': 3, 'SAVE_EVERY': 2}
  first, more = settings | {'STEPS': 4}, settings | {'STEPS': 6, 'SAMPLE': 3}
  one, two = tmp_path / 'one', tmp_path / 'two'
  for changed in first, more:
    done = tiny_run.run(tiny_run.command(one, data, *changed.items()))
    assert done.returncode == 0, done.stderr
    outputs = two_hosts(two, (data, data), changed)
    assert 'Finished step' in outputs[0][0], outputs
    assert 'Finished step' not in outputs[1][0]
  expected, found = figures(one), figures(two)
  assert expected.keys() == found.keys()
  for key, loss in expected.items():
    np.testing.assert_allclose(found[key], loss, rtol=1e-4)


@pytest.mark.slow
def test_hosts_with_other_data_are_refused(tmp_path, data):
  other = tmp_path / 'other'
  tiny_run.write_store(other, seed=1)
  outputs = two_hosts(tmp_path / 'run', (data, other), dict(SETTINGS))
  for _, errors in outputs:
    assert 'process 1 has different values than process 0' in errors
    assert 'differ in data, validation, validation split:' in errors
  assert not (tmp_path / 'run').exists()
