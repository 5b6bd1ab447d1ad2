"""Runs that are asked to stop save and exit; hosts agree on the step."""

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
from meliad_rec.distributed.pod import initialize_distributed
from meliad_rec.distributed.preemption import StopRequest
from meliad_rec.storage.checkpoints import Checkpoints

ROOT = pathlib.Path(__file__).parents[2]


def train(directory, seconds=60):
  """Runs tiny steps, prints each, and saves when it is stopped."""
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
  assert ('Ctrl-C again' in errors) == (number == signal.SIGINT)
  step = int(rest.split()[-1])
  assert rest.splitlines()[-1] == f'saved {step}'
  found, state, data, _ = Checkpoints(tmp_path).restore({'x': jnp.zeros(8)})
  assert (found, data) == (step, {'offset': step})
  assert (state['x'] == jnp.arange(8.0) + step).all()


def test_a_second_ctrl_c_interrupts_and_handlers_are_restored():
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


def test_signals_are_caught_from_the_first_question_on(tmp_path):
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
