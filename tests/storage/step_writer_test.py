"""Saves that are killed or fail, and what orbax is asked.

Kills are slow: python -m pytest -m slow tests/storage/step_writer_test.py
"""

import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

from etils import epath
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from meliad_rec.distributed import hosts
from meliad_rec.storage.checkpoints import Checkpoints
from meliad_rec.storage.step_writer import _Keep
from meliad_rec.storage.step_writer import SaveError
from meliad_rec.storage.step_writer import StepWriter

ROOT = pathlib.Path(__file__).parents[2]


def state_at(step):
  """Makes about 8 MB; every value depends on the step."""
  arrays = {f'w{i}': jnp.full((512, 512), step + i / 8) for i in range(8)}
  return arrays | {'step': jnp.int32(step)}


def save_until_killed(directory):
  """Restores and checks, then saves one step after another until killed."""
  checkpoints = Checkpoints(directory, keep=2)
  step = 0
  if checkpoints.latest() is not None:
    step, state, data, _ = checkpoints.restore(state_at(0))
    assert data == {'offset': 7 * step}
    for name, array in state_at(step).items():
      assert (state[name] == array).all(), name
  print(step, flush=True)
  while True:
    step += 1
    checkpoints.save(step, state_at(step), {'offset': 7 * step}, {})
    print(step, flush=True)


@pytest.mark.slow
def test_25_of_25_kills_restore(tmp_path):
  rng = random.Random(5)
  restored, started = [], 0
  for _ in range(25):
    child = subprocess.Popen(
      [
        sys.executable,
        '-m',
        'tests.storage.step_writer_test',
        str(tmp_path),
      ],
      env=os.environ | {'XLA_FLAGS': '', 'PYTHONPATH': str(ROOT)},
      cwd=ROOT,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    first = child.stdout.readline()
    assert first, child.stderr.read()
    restored.append(int(first))
    # At most the current save and the one just begun are lost.
    assert restored[-1] >= started - 2
    # A random moment after a few saves, scaled to the speed of the machine.
    began = time.monotonic()
    for _ in range(saves := rng.randint(3, 6)):
      started = int(child.stdout.readline())
    time.sleep(rng.uniform(0, 1) * (time.monotonic() - began) / saves)
    child.send_signal(signal.SIGKILL)
    rest, errors = child.communicate()
    assert 'damaged' not in errors
    started = int(rest.split()[-1]) if rest.split() else started
  assert len(restored) == 25
  assert restored == sorted(restored)
  assert restored[-1] > 20
  print('restored after each kill:', restored)


def test_keeping():
  class Info:
    def __init__(self, step):
      self.step = step

  def kept(last, scores):
    infos = [Info(step) for step in (1, 2, 3, 4)]
    flags = _Keep(last, scores).should_preserve(infos, context=None)
    return [i.step for i, flag in zip(infos, flags, strict=True) if flag]

  assert kept(2, {}) == [3, 4]
  assert kept(1, {1: 0.5, 2: -0.5, 3: None}) == [2, 4]
  assert kept(1, {1: None, 4: 2.0}) == [4]
  # The score of a deleted step does not count.
  assert kept(1, {0: -9.0, 1: 3.0}) == [1, 4]


def test_a_full_disk_does_not_take_the_good_step(tmp_path):
  """RLIMIT_FSIZE makes large writes fail, as on a full disk."""
  pytest.importorskip('resource')
  program = f"""
import resource, signal
from tests.storage.step_writer_test import *
checkpoints = Checkpoints({str(tmp_path)!r}, keep=1)
checkpoints.save(1, state_at(1), {{}}, {{}})
checkpoints.wait()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, -1))
noise = {{'x': jax.random.normal(jax.random.key(0), (300, 1000))}}
checkpoints.save(2, state_at(2) | noise, {{}}, {{}})
try:
  checkpoints.wait()
except ValueError as error:
  print('FAILED', error)
print(checkpoints.steps())
print(int(checkpoints.restore(state_at(0))[1]['step']))
"""
  done = subprocess.run(
    [sys.executable, '-c', program],
    env=os.environ | {'XLA_FLAGS': '', 'PYTHONPATH': str(ROOT)},
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )
  lines = done.stdout.splitlines()
  assert lines[0].startswith('FAILED Step 2 was not saved'), done
  assert lines[1:] == ['[1]', '1']
  assert done.stderr.count('was not saved') == 1
  shutil.rmtree(tmp_path)


def test_if_one_host_cannot_save_all_end(tmp_path, monkeypatch):
  """The others would wait for it within the save."""
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(hosts, 'any_of', bool)
  writer = StepWriter(epath.Path(tmp_path), 1)
  monkeypatch.setattr(writer, '_open', lambda: 1 / 0)
  with pytest.raises(SaveError, match='Step 1') as error:
    writer.save(1, None, {})
  assert error.value.exit_code == 1  # Launchers start the run again.


def test_if_one_host_lost_its_manager_all_make_a_new_one(tmp_path, monkeypatch):
  lost = []
  monkeypatch.setattr(hosts, 'any_of', lambda mine: mine or bool(lost))
  checkpoints = Checkpoints(tmp_path)
  managers = []
  for step in (1, 2, 3):
    lost += [True] * (step == 3)
    checkpoints.save(step, state_at(step), {}, {})
    managers.append(checkpoints._writer._manager)
  checkpoints.close()
  assert managers[0] is managers[1] is not managers[2]
  assert checkpoints.steps() == [1, 2, 3]


def test_orbax_asks_no_host_whether_to_stop(tmp_path, monkeypatch):
  """Its questions would disturb the count in preemption.py."""
  asked = []
  ask = lambda _, step: asked.append(step)
  monkeypatch.setattr(ocp.CheckpointManager, 'reached_preemption', ask)
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(7, state_at(7), {}, {})
  checkpoints.close()
  assert checkpoints.steps() == [7]
  assert not asked


if __name__ == '__main__':
  jax.config.update('jax_platforms', 'cpu')
  save_until_killed(sys.argv[1])
