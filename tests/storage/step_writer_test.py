"""Saves that are killed or fail, and what orbax is asked.

Kills are slow: python -m pytest -m slow tests/storage/step_writer_test.py
"""

import random
import signal
import subprocess
import sys
import time
import types

from etils import epath
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from meliad_rec.distributed import hosts
from meliad_rec.storage import checksums
from meliad_rec.storage import step_writer
from meliad_rec.storage.checkpoints import Checkpoints
from meliad_rec.storage.checksums import digest
from meliad_rec.storage.step_writer import SaveError
from meliad_rec.storage.step_writer import StepWriter
from tests import tiny_run


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
      [sys.executable, '-m', 'tests.storage.step_writer_test', str(tmp_path)],
      env=tiny_run.environment(XLA_FLAGS=''),
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
  assert restored == sorted(restored)
  assert restored[-1] > 20


def test_failures_do_not_take_the_good_step(tmp_path, caplog, monkeypatch):
  """RLIMIT_FSIZE makes large writes fail, as on a full disk."""
  resource = pytest.importorskip('resource')
  checkpoints = Checkpoints(tmp_path, keep=1)
  checkpoints.save(1, state_at(1), {}, {})
  checkpoints.wait()
  noise = {'x': jax.random.normal(jax.random.key(0), (300, 1000))}
  digest(noise)  # Compiled now, because it is written to a cache.
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
  try:
    checkpoints.save(2, state_at(2) | noise, {}, {})
    with pytest.raises(SaveError, match='^Step 2 was not saved'):
      checkpoints.wait()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  monkeypatch.setattr(checksums, 'write', lambda *_: 1 / 0)
  checkpoints.save(3, state_at(3), {}, {})
  with pytest.raises(SaveError, match='^Step 3 was not saved'):
    checkpoints.wait()
  monkeypatch.undo()
  assert caplog.text.count('was not saved') == 2
  assert checkpoints.steps() == [1]
  checkpoints.save(4, state_at(4), {}, {})
  checkpoints.close()
  assert [path.name for path in tmp_path.iterdir()] == ['4']


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
  asked = []
  ask = lambda _, step: asked.append(step)
  monkeypatch.setattr(ocp.CheckpointManager, 'reached_preemption', ask)
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
  # orbax asks no host whether to stop: that would disturb preemption.py.
  assert not asked


if __name__ == '__main__':
  jax.config.update('jax_platforms', 'cpu')
  save_until_killed(sys.argv[1])


def test_space_is_counted_in_bytes(tmp_path, monkeypatch):
  writer = StepWriter(epath.Path(tmp_path / 'run'), 1)
  state = {'x': jnp.zeros(1000)}
  for free, fits in (4000, True), (3999, False):
    usage = types.SimpleNamespace(free=free)
    monkeypatch.setattr(step_writer.shutil, 'disk_usage', lambda _, u=usage: u)
    if fits:
      writer.check_space(state)
    else:
      with pytest.raises(OSError, match='4,000 bytes'):
        writer.check_space(state)
