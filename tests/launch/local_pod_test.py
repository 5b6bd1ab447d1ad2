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
  'MLP_DIM': 4096,  # So large that replicas divide the update of its kernels.
}


def start(count, workdir, data, devices=1, more=(), path=(), **changes):
  """Starts processes with these devices each, with further flags or modules."""
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
def one(tmp_path_factory):
  """A folder of data, and the losses of one process with one device."""
  folder = tmp_path_factory.mktemp('one')
  tiny_run.write_store(folder / 'store')
  finish(start(1, folder / 'run', folder / 'store'))
  return folder / 'store', losses(folder / 'run')


def same(found, expected):
  """Compares losses, up to the order in which rows are summed."""
  assert found.keys() == expected.keys()
  for key, loss in expected.items():
    np.testing.assert_allclose(found[key], loss, rtol=1e-5, err_msg=str(key))


@pytest.mark.slow
def test_two_and_four_processes_give_the_loss_of_one(tmp_path, one):
  """Bit for bit, if one process has as many devices."""
  data, expected = one
  found, digests = {}, {}
  for count, devices in (1, 4), (2, 2), (4, 1):
    workdir = tmp_path / f'{count}x{devices}'
    output = finish(start(count, workdir, data, devices))
    found[count] = losses(workdir)
    digests[count] = re.findall('^step 12 sha256 .*', output, re.M)
  assert found[1] == found[2] == found[4]
  assert digests[1] == digests[2] == digests[4]
  assert len(digests[1]) == 4
  same(found[4], expected)


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
def test_rows_of_a_host_need_not_be_consecutive(tmp_path, one):
  """As on most TPU slices, where a host is a square of chips."""
  data, expected = one
  (tmp_path / 'alternate.py').write_text(MESH)
  options = tmp_path / 'options'
  options.mkdir()
  (options / 'alternate.gin').write_text(BINDING)
  more = [f'--gin_file={options}/alternate.gin']
  workdir = tmp_path / 'run'
  finish(start(2, workdir, data, 2, more, [tmp_path]))
  same(losses(workdir), expected)


def until(script, step):
  """Reads until this step, and returns the id of process 1."""
  started = (re.match(r'Process 1 of \d+ is (\d+)\.', x) for x in script.stderr)
  found = next(filter(None, started))
  for line in script.stdout:
    if re.match(rf'step +{step}/', line):
      return int(found[1])
  raise AssertionError(script.stderr.read())


@pytest.mark.slow
def test_a_run_killed_and_stopped_and_resumed_by_any_number_is_that_of_one(
  tmp_path, one
):
  """If one process is killed, the rest end; if one is asked, all save."""
  data, expected = one
  script = start(2, tmp_path, data)
  os.kill(until(script, 6), signal.SIGKILL)
  began = time.monotonic()
  _, errors = script.communicate(timeout=120)
  assert time.monotonic() - began < 60
  assert script.returncode not in (0, 2, 143), errors
  script = start(2, tmp_path, data)
  os.kill(until(script, 7), signal.SIGTERM)
  output, errors = script.communicate(timeout=300)
  assert script.returncode == 143, errors
  step = int(re.search(r'Stopped at step (\d+) .* asked to stop', output)[1])
  saved = [int(p.name) for p in (tmp_path / 'checkpoints').iterdir()]
  assert max(saved) == step
  for count, steps in (1, min(step + 2, 11)), (2, SETTINGS['STEPS']):
    script = start(count, tmp_path, data, STEPS=steps)
    _, errors = script.communicate(timeout=300)
    assert script.returncode == 0, errors
    assert 'Resuming from step' in errors
  found = losses(tmp_path)
  same({key: found[key] for key in expected}, expected)
