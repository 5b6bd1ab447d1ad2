"""How one of several processes joins and ends; see local_pod_test.py too."""

from concurrent import futures
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
from jax.experimental import multihost_utils
import numpy as np
import pytest

from meliad_rec import cli
from meliad_rec.distributed import pod
from meliad_rec.distributed.pod import initialize_distributed

ROOT = pathlib.Path(__file__).parents[2]


def test_a_single_process_just_works():
  assert pod.together(lambda: 7, cli.guarded) == 7
  assert not jax.distributed.is_initialized()
  with pytest.raises(KeyError):
    pod.together(lambda: {}['x'], cli.guarded)


def start(count, what, indices=None, **more):
  """Starts processes that run this file.

  Args:
    count: processes of the cluster.
    what: the argument of each.
    indices: those that are started; None: all.
    more: environment variables.
  """
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  cluster = {
    'JAX_COORDINATOR_ADDRESS': address,
    'JAX_NUM_PROCESSES': str(count),
  }
  return [
    subprocess.Popen(
      [sys.executable, '-m', 'tests.distributed.pod_test', what],
      env=os.environ
      | {'XLA_FLAGS': '', 'PYTHONPATH': str(ROOT), 'JAX_PROCESS_ID': str(index)}
      | cluster
      | more,
      cwd=ROOT,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for index in (range(count) if indices is None else indices)
  ]


def ended(children):
  """(exit code, last line of stderr) of each."""
  errors = [child.communicate(timeout=90)[1] for child in children]
  lasts = [text.splitlines()[-1] if text else '' for text in errors]
  return list(zip((c.returncode for c in children), lasts, strict=True))


def test_processes_that_end_together_report_no_error():
  for code, last in ended(start(2, 'end')):
    assert code == 143
    assert not last.startswith('error: ')


def test_one_that_fails_ends_the_others():
  """Its own message and exit code stay, and none waits for the other."""
  (code, last), (wrong, mistake) = ended(start(2, 'fail'))
  assert (wrong, mistake) == (2, 'error: Wrong here.')
  assert code not in (0, 2)
  assert last.startswith('error: Process 0 of 2 ')
  assert 'Run the same command' in last


@pytest.mark.parametrize(
  'index, asked', [(0, signal.SIGTERM), (1, signal.SIGTERM), (1, signal.SIGINT)]
)
def test_a_signal_ends_a_process_that_waits_for_the_others(index, asked):
  [child] = start(2, 'end', [index], JAX_LOGGING_LEVEL='INFO')
  for line in child.stderr:
    if 'Connecting to JAX distributed service' in line:
      break
  time.sleep(0.5)
  child.send_signal(asked)
  began = time.monotonic()
  [(code, _)] = ended([child])
  assert time.monotonic() - began < 20
  assert code == -asked


@pytest.mark.slow
@pytest.mark.parametrize('lost', [0, 1])
def test_one_that_is_killed_ends_those_that_wait_for_it(lost):
  """Even if no computation of theirs fails, as on a TPU."""
  children = start(2, 'wait')
  for child in children:
    assert child.stdout.readline() == 'ready\n'
  children[lost].kill()
  began = time.monotonic()
  ends = ended(children)
  assert time.monotonic() - began < 60
  assert ends[lost][0] == -signal.SIGKILL
  assert all(code != 0 for code, _ in ends)


@pytest.mark.parametrize(
  'given',
  [
    {'JAX_COORDINATOR_ADDRESS': 'localhost:1'},
    {'JAX_NUM_PROCESSES': '2'},
    {'JAX_PROCESS_ID': '0'},
    {'JAX_NUM_PROCESSES': '2', 'JAX_PROCESS_ID': '1'},
    {'JAX_NUM_PROCESSES': 'two'},
  ],
)
def test_half_a_cluster_is_an_error(monkeypatch, given):
  for name, value in given.items():
    monkeypatch.setenv(name, value)
  monkeypatch.setattr(jax.distributed, 'initialize', no_cluster)
  name, value = next(iter(given.items()))
  with pytest.raises(ValueError, match=f'{name} is {value}'):
    initialize_distributed()


def no_cluster(num_processes, process_id, **_):
  """Stands for jax.distributed.initialize without a cluster."""
  if 'JAX_COORDINATOR_ADDRESS' not in os.environ:
    raise ValueError('coordinator_address should be defined.')
  raise ValueError('Number of processes must be defined.')


def test_jax_without_a_cluster():
  """Alone nothing is reported; half a cluster is, in the words of jax."""
  program = (
    'import os, meliad_rec.distributed.pod as p;'
    'p.initialize_distributed(); os.environ["JAX_NUM_PROCESSES"] = "2";'
    'p.initialize_distributed()'
  )
  done = subprocess.run(
    [sys.executable, '-c', program],
    env=os.environ,
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
  )
  last = done.stderr.splitlines()[-1]
  assert 'JAX_NUM_PROCESSES is 2: coordinator' in last, done.stderr


def test_a_cluster_that_cannot_be_joined_is_an_error(monkeypatch):
  def broken(**_):
    raise ValueError('The process id of the current process must be defined.')

  monkeypatch.setattr(jax.distributed, 'initialize', broken)
  with pytest.raises(ValueError, match='process id'):
    initialize_distributed()


def test_alone_in_its_cluster_a_process_keeps_its_signals(monkeypatch):
  """jax handles SIGTERM only so that several hosts agree."""
  before = signal.getsignal(signal.SIGTERM)
  mine = lambda number, frame: None
  taken = lambda **_: signal.signal(signal.SIGTERM, signal.SIG_DFL)
  monkeypatch.setattr(jax.distributed, 'initialize', taken)
  signal.signal(signal.SIGTERM, mine)
  try:
    initialize_distributed()
    assert signal.getsignal(signal.SIGTERM) is mine
  finally:
    signal.signal(signal.SIGTERM, before)


def test_signals_of_the_system_and_other_threads_are_left_alone(monkeypatch):
  def join(**_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # As jax does.

  monkeypatch.setattr(jax.distributed, 'initialize', join)
  before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
  try:
    initialize_distributed()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
  finally:
    signal.signal(signal.SIGTERM, before)
  monkeypatch.setattr(jax.distributed, 'initialize', lambda **_: None)
  with futures.ThreadPoolExecutor(1) as pool:
    pool.submit(initialize_distributed).result()


def test_a_failed_join_is_an_error(monkeypatch):
  """For example if another process has the port of the first."""

  def broken(**_):
    raise RuntimeError('UNKNOWN: Failed to start the service.\nMore.')

  monkeypatch.setattr(jax.distributed, 'initialize', broken)
  with pytest.raises(ValueError, match='Failed to start the service'):
    initialize_distributed()


def test_a_notebook_that_has_used_jax_runs_alone(monkeypatch):
  def late(**_):
    raise RuntimeError('It must be called before any JAX calls.')

  monkeypatch.setattr(jax.distributed, 'initialize', late)
  initialize_distributed()


def work():
  what, index = sys.argv[1], jax.process_index()
  if what == 'wait':
    print('ready', flush=True)
    time.sleep(120)
  for _ in range(3):
    multihost_utils.process_allgather(np.ones(2))
    if what == 'fail' and index == 1:
      raise ValueError('Wrong here.')
  return 143


def guarded(main, rest):
  """Like cli.guarded, which reports only mistakes of the package's own code."""
  try:
    return main(rest)
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2


if __name__ == '__main__':
  # As in cli.run_main, even if this was started in the background.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  signal.signal(signal.SIGINT, signal.default_int_handler)
  sys.exit(pod.together(work, guarded))
