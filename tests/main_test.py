"""The training command, as a person sees it: each test starts processes."""

import random
import re
import shutil
import signal
import subprocess
import types
from unittest import mock

import jax
import numpy as np
import pytest

from meliad_rec import main
from meliad_rec.report import journal
from meliad_rec.runs import training
from meliad_rec.training import summary
from tests import command
from tests import tiny_run
from tests.ports import free_address

SETTINGS = (
  ('LAYERS', 1),
  ('STEPS', 60),
  ('EVAL_EVERY', 16),
  ('SAVE_EVERY', 12),
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
  training.log_changes(old, 'A = 2\n')
  assert 'changed since the last start: A was 1 and is 2' in caplog.text
  for content in (b'A = (', b'A = "\xe9"'):
    caplog.clear()
    old.write_bytes(content)
    training.log_changes(old, 'A = 2\n')
    assert 'cannot be compared with ' in caplog.text
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


def start(workdir, data, *settings, **environment):
  """Starts the training command, or resumes a run."""
  return subprocess.Popen(
    tiny_run.command(workdir, data, *SETTINGS, *settings),
    env=tiny_run.environment(**environment),
    cwd='/',
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def wait_for(child, at):
  """Returns when a run reports a step, or a later one."""
  for line in child.stdout:
    step = re.match(r'step +(\d+)/', line)
    if step and int(step[1]) >= at:
      return


@pytest.mark.slow
def test_a_run_stopped_any_way_ends_as_one_never_stopped(tmp_path, data, whole):
  """kill -9, then SIGTERM, each at a random step, with batches in flight.

  With dropout, an average of the weights, gradients accumulated over two steps,
  and evaluations before and after each stop.
  """
  kill, term = random.randint(18, 26), random.randint(33, 40)
  child = start(tmp_path, data)
  wait_for(child, kill)
  child.kill()
  child.communicate()
  assert child.returncode == -signal.SIGKILL
  child = start(tmp_path, data)
  wait_for(child, term)
  child.terminate()
  output, errors = child.communicate(timeout=600)
  assert child.returncode == 143, errors
  assert 'Resuming from step' in errors
  assert 'Stopped at step' in output, (kill, term)
  again = re.search('train (--gin_file=.*) (--workdir=.*)[.]\n', output)
  python = tiny_run.command(tmp_path, data)[:3]
  done = tiny_run.run([*python, *again.groups(), '--verbose'])
  assert done.returncode == 0, done.stderr
  assert digests(done.stdout) == digests(whole[1].stdout), (kill, term)
  assert figures(tmp_path) == figures(whole[0])


@pytest.mark.slow
def test_the_training_step_is_compiled_once_and_its_state_donated(whole):
  _, done = whole
  assert done.stderr.count('Finished XLA compilation of jit(train_step)') == 1
  assert done.stderr.count('Finished XLA compilation of jit(eval_step)') == 1
  assert 'donated' not in done.stderr


def test_what_a_run_leaves_and_tells(whole):
  workdir, done = whole
  names = {path.name for path in workdir.iterdir()}
  assert names == {
    *('checkpoints', 'config.gin', 'run.json', 'metrics.jsonl', 'tensorboard'),
    *('loss_nats_per_token.png', '.lock', 'profile'),
  }
  steps = {step for step, split in figures(workdir) if split == 'train'}
  assert steps == set(range(1, 61))
  assert done.stdout.splitlines()[-1].startswith('Finished step 60 after')
  shares = re.search(r'^Time: (.*), of \d+ s\.$', done.stderr, re.M)[1]
  parts = dict(each.split('% ')[::-1] for each in shares.split(', '))
  names = 'step', 'compile', 'data wait', 'evaluation', 'checkpoint', 'other'
  assert tuple(parts) == names
  assert sum(map(float, parts.values())) == pytest.approx(100, abs=0.5)
  (trace,) = (workdir / 'profile').rglob('*.xplane.pb')
  assert 'The trace for XProf is in' in done.stderr
  content = trace.read_bytes()
  assert b'train' in content and b'step_num' in content


@pytest.mark.slow
def test_another_model_in_the_folder_is_refused_and_nothing_lost(data, whole):
  workdir, _ = whole
  contents = lambda: {
    path: path.read_bytes() for path in workdir.rglob('*') if path.is_file()
  }
  before = contents()
  command = tiny_run.command(workdir, data, *SETTINGS, ('MLP_DIM', 24))
  done = tiny_run.run(command)
  assert done.returncode == 2, done.stderr
  assert re.match(r'error: .*mlp/\S+ with shape', done.stderr.splitlines()[-1])
  assert 'Traceback' not in done.stderr
  assert contents() == before


@pytest.mark.slow
def test_settings_that_may_change_are_told_and_a_damaged_step_passed_over(
  tmp_path, data, whole
):
  workdir = shutil.copytree(whole[0], tmp_path / 'run')
  largest = max(
    (workdir / 'checkpoints' / '60' / 'state').rglob('*'),
    key=lambda path: path.stat().st_size if path.is_file() else 0,
  )
  damaged = bytearray(largest.read_bytes())
  damaged[len(damaged) // 2] ^= 1
  largest.write_bytes(damaged)
  done = tiny_run.run(tiny_run.command(workdir, data, *SETTINGS, ('STEPS', 62)))
  assert done.returncode == 0, done.stderr
  assert re.search('warning: Step 60 of .* is damaged', done.stderr)
  assert 'warning: Using step 48 in place of [60].' in done.stderr
  assert 'STEPS was 60 and is 62' in done.stderr
  assert (workdir / 'checkpoints' / '60.corrupt').is_dir()
  assert 'STEPS = 62' in (workdir / 'config.gin').read_text()
  found = figures(workdir)
  assert {(step, 'train') for step in range(1, 63)} <= found.keys()
  for key, loss in figures(whole[0]).items():
    if key[1] == 'train':
      assert found[key] == loss


def test_a_disk_that_fails_is_no_mistake_of_a_setting(tmp_path, monkeypatch):
  """Exit code 2 would tell launchers not to start the run again."""

  run = mock.Mock(workdir=tmp_path, step=0)
  run.live.side_effect = OSError(116, 'Stale file handle', 'metrics.jsonl')
  monkeypatch.setattr(training.trainer, 'Run', lambda *_: run)
  monkeypatch.setattr(training.folder, 'write', lambda *_: None)
  monkeypatch.setattr(training.config, 'operative', str)
  with pytest.raises(OSError, match='Stale') as told:
    training.run_experiment(mock.Mock(), tmp_path)
  assert told.value.exit_code == 1


@pytest.mark.parametrize('finished', [False, True])
def test_a_finished_run_keeps_its_settings(tmp_path, monkeypatch, finished):
  run = mock.Mock(workdir=tmp_path, step=6, finished=finished)
  run.live = lambda first: first()
  monkeypatch.setattr(training.trainer, 'Run', lambda *_: run)
  write = mock.Mock()
  monkeypatch.setattr(training.folder, 'write', write)
  monkeypatch.setattr(training.config, 'operative', lambda: 'STEPS = 4\n')
  (tmp_path / 'config.gin').write_text('STEPS = 6\n')
  training.run_experiment(mock.Mock(), tmp_path)
  assert write.called != finished


@pytest.mark.slow
def test_a_dry_run_tells_all_and_writes_nothing(tmp_path, data):
  arguments = tiny_run.command(tmp_path / 'run', data, *SETTINGS)
  done = tiny_run.run([*arguments, '--dry_run', '--mesh=fsdp:1'])
  assert done.returncode == 0, done.stderr
  assert 'STEPS = 60' in done.stdout
  assert 'partition.make_mesh.fsdp = 1' in done.stdout
  assert re.search(r'embed/embedding +\(259, 16\) +4,144', done.stdout)
  assert re.search(r'memory per device.* MiB state', done.stdout)
  assert 'train: 9 documents, 1,062 tokens' in done.stdout
  assert not (tmp_path / 'run').exists()
  done = tiny_run.run([*arguments, '--dry_run', '--mesh=model:2'])
  assert done.returncode == 2
  assert 'needs 2 devices, but there are 1. Give --mesh' in done.stderr


@pytest.mark.parametrize('flag', ['--profile=1:2', '--verbose'])
def test_a_dry_run_refuses_what_needs_steps(flag):
  answer = command.mistake(main, '--dry_run', '--gin_file=size/tiny', flag)
  assert f'so {flag.partition("=")[0]} has nothing to do' in answer


def code_of(experiment, *arguments):
  """Returns the exit code of main.work in this process."""
  work = types.SimpleNamespace(
    __name__='train', define_flags=main.define_flags, main=lambda _: main.work()
  )
  built = mock.patch.object(training, 'build', lambda *_: experiment)
  with built, mock.patch.object(main.config, 'parse'):
    return command.run(work, *arguments)


@pytest.mark.parametrize(
  'error, code',
  [('RESOURCE_EXHAUSTED: 9G of 8G hbm.\nMore.', 3), ('INTERNAL: No.', None)],
)
def test_a_dry_run_of_a_step_that_the_compiler_refuses(
  tmp_path, monkeypatch, capsys, error, code
):
  """As XLA for TPUs refuses one that does not fit."""

  def compiled(program):
    raise jax.errors.JaxRuntimeError(error)

  monkeypatch.setattr(summary, 'step_bytes', compiled)
  stored = tiny_run.write_store(tmp_path / 'store')
  experiment = tiny_run.experiment(stored, tiny_run.program())
  if code is None:
    with pytest.raises(jax.errors.JaxRuntimeError):
      code_of(experiment, '--dry_run')
    return
  assert code_of(experiment, '--dry_run') == code
  *_, steps, last = capsys.readouterr().out.splitlines()
  assert steps == '6 steps of 4 x 16 = 64 tokens'
  assert '(RESOURCE_EXHAUSTED: 9G of 8G hbm). Lower BATCH' in last


@pytest.mark.parametrize(
  'stop_at, name', [(4, 'experiment.Experiment.stop_at'), (9, 'STEPS')]
)
def test_a_finished_run_names_the_setting_that_ended_it(
  tmp_path, monkeypatch, capsys, stop_at, name
):
  stored = tiny_run.write_store(tmp_path / 'store')
  experiment = tiny_run.experiment(
    stored, tiny_run.program(), steps=6, stop_at=stop_at
  )
  last = experiment.last_step
  run = mock.Mock(step=last, finished=True, workdir=tmp_path)
  run.checkpoints.exit_code, run.goodput.whole = 0, 0
  monkeypatch.setattr(training, 'run_experiment', lambda *_: (run, None))
  assert code_of(experiment, f'--workdir={tmp_path}') == 0
  said = capsys.readouterr().out
  assert f'{name} is {last}. ' in said and f'larger {name} trains' in said


def two_hosts(workdir, datas, *settings):
  """Starts both processes of a run on two hosts of one device each."""
  address = free_address()
  return [
    start(
      *(workdir, data, *settings),
      JAX_COORDINATOR_ADDRESS=address,
      JAX_NUM_PROCESSES='2',
      JAX_PROCESS_ID=str(index),
    )
    for index, data in enumerate(datas)
  ]


@pytest.mark.slow
def test_two_processes_give_the_loss_of_one(tmp_path, data):
  """Also if Ctrl-C stops one and they resume; with a sample.

  pytest -m slow tests/main_test.py
  """
  one, two = tmp_path / 'one', tmp_path / 'two'
  sample = 'SAMPLE', 3
  done = tiny_run.run(tiny_run.command(one, data, *SETTINGS, sample))
  assert done.returncode == 0, done.stderr
  children = two_hosts(two, (data, data), sample)
  wait_for(children[0], 10)
  children[1].send_signal(signal.SIGINT)
  outputs = [child.communicate(timeout=600) for child in children]
  assert [child.returncode for child in children] == [143, 130], outputs
  assert 'Stopped at step' in outputs[0][0]
  children = two_hosts(two, (data, data), sample)
  outputs = [child.communicate(timeout=600) for child in children]
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
  for child in two_hosts(tmp_path / 'run', (data, other)):
    _, errors = child.communicate(timeout=600)
    assert 'process 1 has different values than process 0' in errors
    assert 'differ in data, validation, validation split:' in errors
  assert not (tmp_path / 'run').exists()
