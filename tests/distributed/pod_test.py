"""How one of several processes joins and ends; see local_pod_test.py too."""

from concurrent import futures
import os
import pathlib
import signal
import subprocess
import sys
import time
from unittest import mock

import jax
from jax.experimental import multihost_utils
import numpy as np
import pytest

from meliad_rec import cli
from meliad_rec.distributed import pod
from meliad_rec.distributed.pod import initialize_distributed
from tests.ports import free_address

ROOT = pathlib.Path(__file__).parents[2]
CLUSTERS = 'SLURM_', 'OMPI_', 'KUBERNETES_', 'TPU_', 'JAX_COORDINATOR'
CLUSTERS += 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'


def alone():
  """Returns the environment without the variables of a cluster."""
  return {k: v for k, v in os.environ.items() if not k.startswith(CLUSTERS)}


@mock.patch.dict(os.environ, alone(), clear=True)
def test_a_single_process_just_works():
  assert pod.run_on_all_processes(lambda: 7, cli.guarded) == 7
  assert not jax.distributed.is_initialized()
  with pytest.raises(KeyError):
    pod.run_on_all_processes(lambda: {}['x'], cli.guarded)


def start(what, indices=(0, 1), **more):
  """Starts these processes of a cluster of two; each runs this file."""
  address = free_address()
  cluster = {'JAX_COORDINATOR_ADDRESS': address, 'JAX_NUM_PROCESSES': '2'}
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
    for index in indices
  ]


def ended(children):
  """(exit code, last line of stderr) of each."""
  errors = [child.communicate(timeout=90)[1] for child in children]
  lasts = [text.splitlines()[-1] if text else '' for text in errors]
  return list(zip((c.returncode for c in children), lasts, strict=True))


@pytest.fixture(scope='module')
def ends():
  """How the processes of two clusters end, which run at once."""
  started = {what: start(what) for what in ('end', 'fail')}
  return {what: ended(children) for what, children in started.items()}


def test_processes_that_end_together_report_no_error(ends):
  for code, last in ends['end']:
    assert code == 143
    assert not last.startswith('error: ')


def test_one_that_fails_ends_the_others(ends):
  """Its own message and exit code stay, and none waits for the other."""
  (code, last), (wrong, mistake) = ends['fail']
  assert (wrong, mistake) == (2, 'error: Wrong here.')
  assert code not in (0, 2)
  assert last.startswith('error: Process 0 of 2 ')
  assert 'Run the same command' in last


def test_a_signal_ends_a_process_that_waits_for_the_others():
  given = (0, signal.SIGTERM), (1, signal.SIGINT)
  children = [
    start('end', [index], JAX_LOGGING_LEVEL='INFO')[0] for index, _ in given
  ]
  for child, (_, asked) in zip(children, given, strict=True):
    for line in child.stderr:
      if 'Connecting to JAX distributed service' in line:
        break
    time.sleep(0.5)
    child.send_signal(asked)
  began = time.monotonic()
  codes = [code for code, _ in ended(children)]
  assert time.monotonic() - began < 20
  assert codes == [-asked for _, asked in given]


@pytest.mark.slow
@pytest.mark.parametrize('lost', [0, 1])
def test_one_that_is_killed_ends_those_that_wait_for_it(lost):
  """Even if no computation of theirs fails, as on a TPU."""
  children = start('wait')
  for child in children:
    assert child.stdout.readline() == 'ready\n'
  children[lost].kill()
  began = time.monotonic()
  ends = ended(children)
  assert time.monotonic() - began < 60
  assert ends[lost][0] == -signal.SIGKILL
  assert all(code != 0 for code, _ in ends)


NO_ADDRESS = ValueError('coordinator_address should be defined.')
NO_COUNT = ValueError('Number of processes must be defined.')
USED_BEFORE = RuntimeError('It must be called before any JAX calls.')


@pytest.mark.parametrize(
  'given, raised, told',
  [
    # Half a cluster.
    ({'JAX_COORDINATOR_ADDRESS': 'a:1'}, NO_COUNT, 'ADDRESS is a:1'),
    ({'JAX_PROCESS_ID': '0'}, NO_ADDRESS, 'JAX_PROCESS_ID is 0'),
    ({'JAX_NUM_PROCESSES': 'two'}, None, 'JAX_NUM_PROCESSES is two'),
    ({'JAX_COORDINATOR_ADDRESS': 'a'}, None, 'is a, which has no port'),
    # A cluster that cannot be joined, as another process has its port.
    ({}, NO_COUNT, 'Number of processes'),
    (
      {},
      RuntimeError('UNKNOWN: Failed to start.\nMore.'),
      'to start\\). Check',
    ),
    # A notebook that has used jax runs alone.
    ({}, USED_BEFORE, None),
  ],
)
def test_joining_fails(monkeypatch, given, raised, told):
  for name, value in given.items():
    monkeypatch.setenv(name, value)
  initialize = mock.Mock(side_effect=raised)
  monkeypatch.setattr(jax.distributed, 'initialize', initialize)
  if told is None:
    initialize_distributed()
  else:
    with pytest.raises(ValueError, match=told) as caught:
      initialize_distributed()
    # Launchers start a process again, unless it ends with 2.
    again = isinstance(raised, RuntimeError)
    assert getattr(caught.value, 'exit_code', 2) == (1 if again else 2)


def test_devices_that_cannot_be_used_are_not_a_failed_join(monkeypatch):
  monkeypatch.setattr(jax.distributed, 'initialize', lambda **_: None)
  in_use = RuntimeError('The TPU is already in use.')
  monkeypatch.setattr(jax, 'process_count', mock.Mock(side_effect=in_use))
  with pytest.raises(RuntimeError, match='already in use'):
    initialize_distributed()


def test_jax_without_a_cluster():
  """Alone nothing is reported; half a cluster is, in the words of jax."""
  program = (
    'import os, meliad_rec.distributed.pod as p;'
    'p.initialize_distributed(); os.environ["JAX_NUM_PROCESSES"] = "2";'
    'p.initialize_distributed()'
  )
  done = subprocess.run(
    [sys.executable, '-c', program],
    env=alone(),
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
  )
  last = done.stderr.splitlines()[-1]
  assert 'JAX_NUM_PROCESSES is 2: coordinator' in last, done.stderr


@pytest.mark.parametrize('system', [False, True])
def test_alone_in_its_cluster_a_process_keeps_its_signals(monkeypatch, system):
  """jax handles SIGTERM only so that several hosts agree.

  The former handler is restored, also if it is the default of the system.
  """
  mine = signal.SIG_DFL if system else (lambda number, frame: None)
  taken = lambda **_: signal.signal(
    signal.SIGTERM, signal.SIG_IGN if system else signal.SIG_DFL
  )
  monkeypatch.setattr(jax.distributed, 'initialize', taken)
  before = signal.signal(signal.SIGTERM, mine)
  try:
    initialize_distributed()
    assert signal.getsignal(signal.SIGTERM) == mine
  finally:
    signal.signal(signal.SIGTERM, before)


def test_another_thread_may_join(monkeypatch):
  """Only the main thread has signals."""
  monkeypatch.setattr(jax.distributed, 'initialize', lambda **_: None)
  with futures.ThreadPoolExecutor(1) as pool:
    pool.submit(initialize_distributed).result()


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
  sys.exit(pod.run_on_all_processes(work, guarded))
