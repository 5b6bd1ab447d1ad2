"""Runs of several processes on this machine, started by local_pod.sh."""

import os
import re
import signal
import subprocess
import time

import numpy as np
import pytest

from meliad_rec.report import journal
from tests import tiny_run

SCRIPT = tiny_run.ROOT / 'launch' / 'local_pod.sh'
SETTINGS = {
  'BATCH': 4,
  'STEPS': 12,
  'EVAL_EVERY': 6,
  'SAVE_EVERY': 4,
  'DROPOUT': 0.1,
}


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  folder = tmp_path_factory.mktemp('data') / 'store'
  tiny_run.write_store(folder)
  return folder


def start(count, workdir, data, devices=1, more=(), path=(), **changes):
  """Starts the script with the flags of tiny_run.command.

  Args:
    count: processes.
    workdir, data: folders of the run and its data.
    devices: devices per process.
    more: further flags.
    path: folders of modules.
    **changes: settings.
  """
  _, _, _, *flags = tiny_run.command(
    workdir, data, *(SETTINGS | changes).items()
  )
  return subprocess.Popen(
    ['bash', SCRIPT, str(count), *flags, *more],
    env=tiny_run.environment(
      DEVICES=str(devices),
      PYTHONPATH=':'.join(map(str, [tiny_run.ROOT, *path])),
    ),
    cwd='/',
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(script):
  """Waits for success and returns the output."""
  output, errors = script.communicate(timeout=300)
  assert script.returncode == 0, errors
  return output


def losses(workdir):
  """Returns {(step, split): loss}; each step occurs once."""
  records = journal.read(workdir / journal.NAME)
  found = {(r['step'], r['split']): r['loss_nats_per_token'] for r in records}
  assert len(found) == len(records)
  return found


@pytest.fixture(scope='module')
def one(tmp_path_factory, data):
  """Returns the losses of one process with one device."""
  workdir = tmp_path_factory.mktemp('runs') / 'one'
  finish(start(1, workdir, data))
  return losses(workdir)


def same(found, expected):
  """Compares losses, up to the order in which rows are summed."""
  assert found.keys() == expected.keys()
  for key, loss in expected.items():
    np.testing.assert_allclose(found[key], loss, rtol=1e-5, err_msg=str(key))


@pytest.mark.slow
def test_two_and_four_processes_give_the_loss_of_one(tmp_path, data, one):
  """Bit for bit, if one process has as many devices."""
  found, digests = {}, {}
  for count, devices in (1, 4), (2, 2), (4, 1):
    workdir = tmp_path / f'{count}x{devices}'
    output = finish(start(count, workdir, data, devices))
    found[count] = losses(workdir)
    digests[count] = re.findall('^step 12 sha256 .*', output, re.M)
  assert found[1] == found[2] == found[4]
  assert digests[1] == digests[2] == digests[4]
  assert len(digests[1]) == 4
  same(found[4], one)


MESH = """
import jax
from jax.sharding import AxisType, Mesh
import numpy as np

def make_mesh():
  of_hosts = np.array(jax.devices()).reshape(jax.process_count(), -1)
  types = (AxisType.Auto,) * 3
  axes = 'data', 'fsdp', 'model'
  return Mesh(of_hosts.T.reshape(-1, 1, 1), axes, axis_types=types)
"""
BINDING = """
from __gin__ import dynamic_registration
from meliad_rec.training import experiment
import alternate
experiment.Experiment.mesh = @alternate.make_mesh
"""


@pytest.mark.slow
def test_rows_of_a_host_need_not_be_consecutive(tmp_path, data, one):
  """As on most TPU slices, where a host is a square of chips."""
  (tmp_path / 'alternate.py').write_text(MESH)
  options = tmp_path / 'options'
  options.mkdir()
  (options / 'alternate.gin').write_text(BINDING)
  more = [f'--gin_file={options}/alternate.gin']
  workdir = tmp_path / 'run'
  finish(start(2, workdir, data, 2, more, [tmp_path]))
  same(losses(workdir), one)


def until(script, step, lines):
  """Reads the output until this step."""
  for line in script.stdout:
    lines.append(line)
    if re.match(rf'step +{step}/', line):
      return
  raise AssertionError(script.stderr.read())


def process(script, index):
  """Returns the id of a process of the run."""
  for line in script.stderr:
    if found := re.match(rf'Process {index} of \d+ is (\d+)\.', line):
      return int(found[1])
  raise AssertionError(f'No process {index}.')


@pytest.mark.slow
def test_sigterm_to_one_saves_on_all_and_any_number_resumes(
  tmp_path, data, one
):
  """Two processes, then one, then two; the losses are those of one."""
  script = start(2, tmp_path, data)
  asked, lines = process(script, 1), []
  until(script, 2, lines)
  os.kill(asked, signal.SIGTERM)
  output, errors = script.communicate(timeout=300)
  assert script.returncode == 143, errors
  stopped = re.search(r'Stopped at step (\d+) .* asked to stop', output)
  assert stopped, errors
  step = int(stopped[1])
  saved = [int(p.name) for p in (tmp_path / 'checkpoints').iterdir()]
  assert max(saved) == step
  more = min(step + 2, 11)
  for count, steps in (1, more), (2, SETTINGS['STEPS']):
    script = start(count, tmp_path, data, STEPS=steps)
    output, errors = script.communicate(timeout=300)
    assert script.returncode == 0, errors
    assert 'Resuming from step' in errors
  found = losses(tmp_path)
  same({key: found[key] for key in one}, one)


@pytest.mark.slow
def test_sigterm_during_start_up_ends_all(tmp_path, data):
  """No process waits for others that will not start."""
  script = start(3, tmp_path, data)
  process(script, 2)
  began = time.monotonic()
  script.send_signal(signal.SIGTERM)
  _, errors = script.communicate(timeout=120)
  assert time.monotonic() - began < 60
  assert script.returncode == 143, errors


@pytest.mark.slow
def test_a_killed_process_ends_the_rest_and_nothing_is_lost(
  tmp_path, data, one
):
  script = start(2, tmp_path, data)
  killed, lines = process(script, 1), []
  until(script, 6, lines)
  os.kill(killed, signal.SIGKILL)
  began = time.monotonic()
  _, errors = script.communicate(timeout=120)
  assert time.monotonic() - began < 60
  assert script.returncode not in (0, 2, 143), errors
  finish(start(2, tmp_path, data))
  same(losses(tmp_path), one)


def test_the_usage():
  for arguments in (), ('0',), ('--workdir=a',):
    done = subprocess.run(
      ['bash', SCRIPT, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert 'bash launch/local_pod.sh N [flags' in done.stderr
    assert 'set -e' not in done.stderr


def test_a_mistake_gives_exit_code_2():
  """Every process reports the mistake, before it joins."""
  done = subprocess.run(
    ['bash', SCRIPT, '2', '--no_such_flag'],
    env=tiny_run.environment(),
    cwd='/',
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 2
  assert 'error: There is no flag --no_such_flag' in done.stderr
  assert '[1] error: There is no flag --no_such_flag' in done.stderr
