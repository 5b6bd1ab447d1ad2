"""Checkpoints of a run: damage, kills, failed saves, other devices."""

import os
import shutil
import signal
import sys
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax
import pytest

from meliad_rec.distributed.partition import make_mesh
from meliad_rec.storage import checksums
from meliad_rec.storage.checkpoints import Checkpoints
from meliad_rec.storage.checksums import digest
from meliad_rec.storage.saved_step import CheckpointError
from meliad_rec.storage.saved_step import SavedStep
from tests import bucket
from tests import tiny_run

ABOUT = {'tokenizer': 'bytes', 'data': 'd1'}


def make_state(seed=0):
  """Every kind of leaf and container that a train state has."""
  rng = np.random.default_rng(seed)
  params = {
    'embed': {'kernel': jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)},
    'bias': jnp.asarray(rng.normal(size=8), jnp.bfloat16),
  }
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  return {
    'step': jnp.int32(seed),
    'params': params,
    'opt_state': optimizer.init(params),
    'carry': (jnp.asarray(rng.normal(size=(8, 3)), jnp.float32), ()),
    'start': jnp.asarray(rng.integers(0, 2, 5), bool),
    'rng': jax.random.key_data(jax.random.key(seed)),
    'ema': None,
  }


def save_all(directory, *steps, make=make_state):
  checkpoints = Checkpoints(directory)
  for step in steps:
    checkpoints.save(step, make(step), {'offset': step}, ABOUT)
  checkpoints.close()


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  directory = tmp_path_factory.mktemp('saved') / 'run'
  save_all(directory, 10, 20)
  return directory


@pytest.fixture
def run(saved, tmp_path):
  """A copy of a run with steps 10 and 20, to damage."""
  shutil.copytree(saved, tmp_path / 'run')
  return tmp_path / 'run'


def test_round_trip_is_exact(saved):
  state = make_state(20)
  step, restored, data, about = Checkpoints(saved).restore(make_state(1))
  assert (step, data, about) == (20, {'offset': 20}, ABOUT)
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  for a, b in zip(*map(jax.tree.leaves, (restored, state)), strict=True):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
  assert digest(restored) == digest(state)


def test_readers_write_nothing(saved, tmp_path):
  before = sorted(str(path) for path in saved.rglob('*'))
  assert Checkpoints(saved).restore(make_state(), step=10)[0] == 10
  with pytest.raises(CheckpointError, match=r'no step 15\. .*\[10, 20\]'):
    Checkpoints(saved).restore(make_state(), step=15)
  params = make_state()['params']
  step, restored, about = Checkpoints(saved).restore_params(params)
  assert (step, about) == (20, ABOUT)
  assert digest(restored) == digest(make_state(20)['params'])
  del params['bias']
  with pytest.raises(CheckpointError, match='params/bias'):
    Checkpoints(saved).restore_params(params)
  assert sorted(str(path) for path in saved.rglob('*')) == before
  missing = Checkpoints(tmp_path / 'none')
  assert missing.latest() is None
  with pytest.raises(CheckpointError, match='none .*--workdir'):
    missing.restore(make_state())
  assert not (tmp_path / 'none').exists()


def test_a_step_that_a_run_deletes_while_it_is_read_is_not_damaged(
  run, monkeypatch, caplog
):
  load, deleted = SavedStep.load, []

  def slow(step, *args):
    if not deleted:
      deleted.append(step.folder.name)
      shutil.rmtree(step.folder)
    return load(step, *args)

  monkeypatch.setattr(SavedStep, 'load', slow)
  assert Checkpoints(run).restore(make_state())[0] == 10
  assert deleted == ['20'] and 'damaged' not in caplog.text


def test_another_model_or_run_is_refused_and_nothing_put_aside(saved):
  other = make_state() | {'start': jnp.zeros(6, bool)}
  with pytest.raises(CheckpointError, match=f'^Step 20 of {saved} '):
    Checkpoints(saved).restore(other)
  for key in ABOUT:
    with pytest.raises(
      CheckpointError, match=rf'{key} {ABOUT[key]}.* other\. '
    ):
      Checkpoints(saved).restore(make_state(), match={key: 'other'})
  assert Checkpoints(saved).steps() == [10, 20]
  assert Checkpoints(saved).restore(make_state(), match=ABOUT)[0] == 20


def flip(path):
  raw = bytearray(path.read_bytes())
  raw[len(raw) // 2] ^= 8
  path.write_bytes(raw)


DAMAGE = {
  'flip': flip,
  'truncate': lambda path: os.truncate(path, path.stat().st_size // 2),
  'delete': lambda path: path.unlink(),
}
# orbax writes these after the manifest; their contents are never read.
UNREAD = ('_CHECKPOINT_METADATA', 'commit_success.txt')


@pytest.mark.parametrize('damage', DAMAGE)
def test_damage_to_any_file_is_named_and_the_step_before_used(
  saved, tmp_path, caplog, damage
):
  names = [
    str(path.relative_to(saved / '20'))
    for path in (saved / '20').rglob('*')
    if path.is_file()
  ]
  assert len(names) > 10
  for i, name in enumerate(sorted(names)):
    run = tmp_path / str(i)
    shutil.copytree(saved, run)
    DAMAGE[damage](run / '20' / name)
    caplog.clear()
    step, state, data, _ = Checkpoints(run).restore(make_state())
    assert data == {'offset': step}
    assert digest(state) == digest(make_state(step))
    if name in UNREAD and damage != 'delete':
      assert step == 20
    else:
      assert step == 10
      assert f'Step 20 of {run} is damaged: {name} ' in caplog.text
      assert 'Using step 10 in place of [20].' in caplog.text
      assert (run / '20.corrupt').exists()


def test_when_nothing_verifies_all_is_left_in_place(run):
  for step in '10', '20':
    flip(run / step / 'meta/metadata')
  with pytest.raises(CheckpointError, match=r'metadata was changed\..*--step'):
    Checkpoints(run).restore(make_state(), step=20)
  with pytest.raises(CheckpointError, match='holds no step that can be used'):
    Checkpoints(run).restore(make_state())
  assert Checkpoints(run).steps() == [10, 20]


def test_fingerprints_guard_what_a_manifest_does_not(run):
  """The arrays of another step, with a matching manifest."""
  shutil.rmtree(run / '20/state')
  shutil.copytree(run / '10/state', run / '20/state')
  (run / '20' / checksums.NAME).unlink()
  checksums.write(run / '20')
  with pytest.raises(CheckpointError, match='has changed values'):
    Checkpoints(run).restore(make_state(), step=20)


def test_training_goes_on_from_the_step_before(run):
  flip(run / '20/data/metadata')
  checkpoints = Checkpoints(run)
  assert checkpoints.restore(make_state())[0] == 10
  for step in 15, 20:
    assert checkpoints.save(step, make_state(step), {'offset': step}, ABOUT)
  checkpoints.close()
  assert checkpoints.steps() == [10, 15, 20]
  assert checkpoints.restore(make_state())[0] == 20


def test_donating_the_state_while_it_is_saved(tmp_path):
  """The next step overwrites the buffers at once."""
  step_on = jax.jit(lambda x: x * 1.5 + 1, donate_argnums=0)
  x = jnp.arange(400_000.0).reshape(1000, 400)
  checkpoints = Checkpoints(tmp_path)
  saved = {}
  for step in range(3):
    saved[step] = digest({'x': x})
    checkpoints.save(step, {'x': x}, {}, {})
    for _ in range(20):
      x = step_on(x)
  checkpoints.close()
  for step, expected in saved.items():
    assert digest(checkpoints.restore({'x': x}, step)[1]) == expected


def test_a_signal_during_the_last_save_does_not_end_the_process(
  tmp_path, monkeypatch
):
  # A shell ignores SIGINT for background processes.
  before = signal.getsignal(signal.SIGINT)
  checkpoints = Checkpoints(tmp_path)
  assert not checkpoints.preempted()
  finish = checkpoints._writer.close

  def close():
    os.kill(os.getpid(), signal.SIGINT)
    finish()

  monkeypatch.setattr(checkpoints._writer, 'close', close)
  checkpoints.save(1, make_state(1), {}, ABOUT)
  checkpoints.close()
  assert checkpoints.steps() == [1]
  assert checkpoints.exit_code == 130
  assert signal.getsignal(signal.SIGINT) is before


def test_what_cannot_be_saved(run):
  with pytest.raises(ValueError, match='keep'):
    Checkpoints(run, keep=0)
  with pytest.raises(ValueError, match='best_is'):
    Checkpoints(run, best_is='min')
  checkpoints = Checkpoints(run)
  assert not checkpoints.save(20, make_state(20), {'offset': 20}, ABOUT)
  for step, seed in (20, 21), (19, 19):
    with pytest.raises(CheckpointError, match='already holds step 20'):
      checkpoints.save(step, make_state(seed), {}, ABOUT)


def test_a_failed_save_is_reported_and_the_next_one_works(tmp_path, caplog):
  run = tmp_path / 'run'
  checkpoints = Checkpoints(run)
  checkpoints.save(1, make_state(1), {}, ABOUT)
  checkpoints.wait()
  run.rename(tmp_path / 'away')
  run.touch()
  checkpoints.save(2, make_state(2), {}, ABOUT)
  with pytest.raises(CheckpointError, match='^Step 2 was not saved'):
    checkpoints.wait()
  run.unlink()
  (tmp_path / 'away').rename(run)
  assert caplog.text.count('Step 2 was not saved') == 1
  assert checkpoints.steps() == [1]
  checkpoints.save(3, make_state(3), {}, ABOUT)
  checkpoints.close()
  assert sorted(path.name for path in run.iterdir()) == ['1', '3']
  assert digest(checkpoints.restore(make_state())[1]) == digest(make_state(3))


def full_disk(folder, *_):
  raise OSError(f'No space left on device: {folder}')


def test_the_rest_of_a_killed_save_is_deleted(run):
  shutil.copytree(run / '20', run / '30.orbax-checkpoint-tmp')
  checkpoints = Checkpoints(run)
  assert checkpoints.latest() == 20
  checkpoints.save(40, make_state(40), {}, ABOUT)
  checkpoints.close()
  names = sorted(path.name for path in run.iterdir())
  assert names == ['10', '20', '40']


def test_the_rest_of_a_killed_save_takes_no_space(tmp_path, monkeypatch):
  """A disk that has space for a step, but not if such a rest is left."""
  rest = tmp_path / '30.orbax-checkpoint-tmp'
  usage = lambda _: mock.Mock(free=0 if rest.exists() else 10**9)
  monkeypatch.setattr(shutil, 'disk_usage', usage)
  rest.mkdir()
  checkpoints = Checkpoints(tmp_path)
  checkpoints.check_space(make_state())
  rest.mkdir()
  checkpoints.save(40, make_state(40), {}, ABOUT)
  checkpoints.close()
  assert checkpoints.steps() == [40]


def test_in_a_bucket_only_a_committed_step_counts(tmp_path, monkeypatch):
  with bucket.served(tmp_path, monkeypatch):
    checkpoints = Checkpoints('gs://bucket/run', best_metric='loss')
    checkpoints.save(20, {'x': jnp.ones(3)}, {}, {})
    checkpoints.wait()
    checkpoints.save(20, {'x': jnp.ones(3)}, {'n': 1}, {}, {'loss': 0.5})
    checkpoints.close()
    (checkpoints.directory / '30' / 'state').mkdir(parents=True)
    assert checkpoints.steps() == [20]
    reader = Checkpoints('gs://bucket/run', best_metric='loss')
    step, state, data, _ = reader.restore({'x': jnp.zeros(3)}, 'best')
  assert (step, data) == (20, {'n': 1}) and (state['x'] == 1).all()


def test_a_bucket_that_cannot_be_read_is_not_empty(tmp_path, monkeypatch):
  def fail(*_):
    raise OSError('503')

  with bucket.served(tmp_path, monkeypatch):
    monkeypatch.setattr(bucket._Backend, 'exists', fail)
    with pytest.raises(OSError, match='503'):
      Checkpoints('gs://bucket/run').latest()


def on_mesh(state, count):
  """Shards the first axis over some devices where it divides evenly."""
  mesh = make_mesh(devices=jax.devices()[:count])

  def place(x):
    split = x.ndim and x.shape[0] % count == 0
    spec = PartitionSpec('data') if split else PartitionSpec()
    return jax.device_put(x, NamedSharding(mesh, spec))

  return jax.tree.map(place, state)


def restored_on(directory, count):
  """The digest of a state that is restored on some devices."""
  target = on_mesh(make_state(), count)
  state = Checkpoints(directory).restore(target)[1]
  for x, expected in zip(*map(jax.tree.leaves, (state, target)), strict=True):
    assert x.sharding == expected.sharding
  return digest(state)


@pytest.mark.slow
def test_saved_on_8_devices_restored_on_4_2_1(tmp_path):
  state = on_mesh(make_state(5), 8)
  save_all(tmp_path, 5, make=lambda _: state)
  for count in 4, 1:
    assert restored_on(tmp_path, count) == digest(state)
  # In a process that has no more devices.
  command = [sys.executable, '-m', 'tests.storage.checkpoints_test', tmp_path]
  flags = '--xla_force_host_platform_device_count=2'
  done = tiny_run.run([*map(str, command)], XLA_FLAGS=flags)
  assert done.stdout.splitlines()[-1] == f'2 {digest(state)}'


if __name__ == '__main__':
  print(jax.device_count(), restored_on(sys.argv[1], jax.device_count()))
