"""Runs asked to stop save their step and leave; hosts agree on the step."""

from concurrent import futures
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from meliad_rec.distributed import preemption
from meliad_rec.distributed.preemption import initialize_distributed
from meliad_rec.distributed.preemption import StopRequest
from meliad_rec.storage.checkpoints import Checkpoints

ROOT = pathlib.Path(__file__).parents[2]


def train(directory, seconds=60):
  """A run of tiny steps that prints each and saves when it is stopped."""
  initialize_distributed()
  initialize_distributed()
  devices = jax.make_mesh(
    (jax.device_count(),), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  spec = jax.sharding.PartitionSpec('data')
  sharding = jax.sharding.NamedSharding(devices, spec)
  x = jax.jit(lambda: jnp.arange(8.0), out_shardings=sharding)()
  step_on = jax.jit(lambda x: x + 1)
  checkpoints = Checkpoints(directory)
  for step in range(1, int(seconds * 50)):
    x = step_on(x)
    if checkpoints.preempted():
      checkpoints.save(step, {'x': x}, {'offset': step}, {})
      checkpoints.close()
      print('saved', step, flush=True)
      return checkpoints.exit_code
    print(step, flush=True)
    time.sleep(0.02)
  raise AssertionError('No signal came.')


def start(directory, **env):
  return subprocess.Popen(
    [sys.executable, '-m', 'tests.distributed.preemption_test', str(directory)],
    env=os.environ | {'XLA_FLAGS': '', 'PYTHONPATH': str(ROOT)} | env,
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def wait_for_line(child, line):
  for given in child.stdout:
    if given.strip() == line:
      return
  raise AssertionError(child.stderr.read())


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_and_ends_the_run(tmp_path, number):
  child = start(tmp_path)
  wait_for_line(child, '5')
  child.send_signal(number)
  rest, errors = child.communicate(timeout=60)
  assert child.returncode == 128 + number, errors
  assert f'{number.name}: saving and stopping after this step.' in errors
  assert ('Ctrl-C again stops at once.' in errors) == (number == signal.SIGINT)
  step = int(rest.split()[-1])
  assert rest.splitlines()[-1] == f'saved {step}'
  found, state, data, _ = Checkpoints(tmp_path).restore({'x': jnp.zeros(8)})
  assert (found, data) == (step, {'offset': step})
  assert (state['x'] == jnp.arange(8.0) + step).all()


def test_the_second_ctrl_c_is_an_interrupt_and_all_is_given_back():
  before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
  stop = StopRequest()
  assert not stop.reached()
  assert stop.exit_code == 0
  os.kill(os.getpid(), signal.SIGINT)
  assert stop.reached()
  assert stop.exit_code == 130
  with pytest.raises(KeyboardInterrupt):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
  stop.close()
  after = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
  assert before == after


def test_nothing_is_listened_to_before_the_first_question(tmp_path):
  before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
  Checkpoints(tmp_path)
  after = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
  assert before == after


def test_a_host_stopped_by_agreement_exits_as_after_sigterm(monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  agreed = {1: False, 2: True}
  monkeypatch.setattr(
    preemption.multihost_utils,
    'reached_preemption_sync_point',
    lambda step: agreed[step],
  )
  stop = StopRequest()
  try:
    assert not stop.reached()
    assert stop.exit_code == 0
    assert stop.reached()
    assert stop.exit_code == 143
  finally:
    stop.close()


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
  with pytest.raises(ValueError, match=f'^{name} is {value}.*, or none.$'):
    initialize_distributed()


def no_cluster(num_processes, process_id, **_):
  """As jax.distributed.initialize where it finds no cluster."""
  if 'JAX_COORDINATOR_ADDRESS' not in os.environ:
    raise ValueError('coordinator_address should be defined.')
  raise ValueError('Number of processes must be defined.')


def test_what_jax_says_where_there_is_no_cluster():
  """Alone, nothing is said; the rest is told by the sentence jax has."""
  program = (
    'import os, meliad_rec.distributed.preemption as p;'
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
  assert last.startswith('ValueError: JAX_NUM_PROCESSES is 2: coordinator'), (
    done.stderr
  )


def test_a_cluster_that_cannot_be_joined_is_an_error(monkeypatch):
  def broken(**_):
    raise ValueError('The process id of the current process must be defined.')

  monkeypatch.setattr(jax.distributed, 'initialize', broken)
  with pytest.raises(ValueError, match='process id'):
    initialize_distributed()


def test_alone_in_its_cluster_a_process_keeps_its_signals(monkeypatch):
  """jax takes SIGTERM for all hosts to agree; one has none to agree with."""
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
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # As jax takes it.

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


def test_a_failed_join_is_not_a_run_of_one_process(monkeypatch):
  """As where another process has the port of the first."""

  def broken(**_):
    raise RuntimeError('UNKNOWN: Failed to start the service.\nMore.')

  monkeypatch.setattr(jax.distributed, 'initialize', broken)
  with pytest.raises(ValueError, match='Failed to start the service. See that'):
    initialize_distributed()


def test_a_notebook_that_has_used_jax_runs_alone(monkeypatch):
  def late(**_):
    raise RuntimeError('It must be called before any JAX calls.')

  monkeypatch.setattr(jax.distributed, 'initialize', late)
  initialize_distributed()


def two_hosts(directory):
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  return [
    start(
      directory,
      JAX_COORDINATOR_ADDRESS=address,
      JAX_NUM_PROCESSES='2',
      JAX_PROCESS_ID=str(index),
      XLA_FLAGS='--xla_force_host_platform_device_count=4',
    )
    for index in (0, 1)
  ]


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_two_hosts_stop_at_one_step_when_one_is_asked(tmp_path, number):
  children = two_hosts(tmp_path)
  wait_for_line(children[1], '5')
  children[1].send_signal(number)
  outputs = [child.communicate(timeout=120) for child in children]
  lasts = [rest.splitlines()[-1] for rest, _ in outputs]
  assert lasts[0] == lasts[1], outputs
  assert lasts[0].startswith('saved ')
  step = int(lasts[0].split()[-1])
  found, state, _, _ = Checkpoints(tmp_path).restore({'x': jnp.zeros(8)})
  assert found == step
  assert (state['x'] == jnp.arange(8.0) + step).all()


if __name__ == '__main__':
  sys.exit(train(sys.argv[1]))
