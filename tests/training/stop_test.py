"""What ends a run early: a request to stop, a full disk, a lost folder."""

import dataclasses
import errno
import re
import shutil
import types

import jax
import pytest

from meliad_rec.generation.sample import Sample
from meliad_rec.report import console
from meliad_rec.runs import training
from meliad_rec.storage import checksums
from meliad_rec.storage import step_writer
from meliad_rec.storage.checkpoints import Checkpoints
from meliad_rec.storage.step_writer import SaveError
from meliad_rec.storage.workdir import Lock
from meliad_rec.storage.workdir import RemovedError
from meliad_rec.training.trainer import Run
from tests import tiny_run


def begun(workdir, data, program=None, **changes):
  program = program or tiny_run.program()
  run = Run(tiny_run.experiment(data, program, **changes), workdir, {})
  run.begin()
  return run


def test_a_stop_compiles_nothing(tmp_path, data, caplog):
  """Compiling evaluate_batch and fingerprints took most of a stop's time."""
  names = {'eval_step', '_lanes', 'train_step'}

  def compiled():
    found = re.findall(r'XLA compilation of jit\((\w+)\)', caplog.text)
    caplog.clear()
    return names & set(found)

  checksums._lanes.clear_cache()
  with jax.log_compiles():
    # A program of its own: other tests have compiled the shared one.
    program = dataclasses.replace(tiny_run.program())
    run = begun(tmp_path, data, program)
    assert compiled() == names
    run.checkpoints.preempted = lambda: run.step == 1
    assert run.live() == 'it was asked to stop'
  assert not compiled()
  assert run.checkpoints.steps() == [1]


def test_a_stop_within_the_sample_leaves_the_evaluation_for_later(
  tmp_path, data
):
  run = begun(tmp_path, data, steps=1, sample=Sample(prompt=8, length=64))
  sampling = []
  decoder = run.validation._decoder
  generate = decoder.generate
  decoder.generate = lambda *args: sampling.append(1) or generate(*args)
  run.checkpoints.preempted = lambda: bool(sampling)
  assert run.live() == 'it was asked to stop'
  assert run.progress.evaluated == 0
  assert run.checkpoints.steps() == [1]


def test_a_folder_that_is_removed_ends_the_run(tmp_path, data):
  run = begun(tmp_path / 'run', data)

  def preempted():
    if run.step == 3:
      shutil.rmtree(tmp_path / 'run')
    return False

  run.checkpoints.preempted = preempted
  with pytest.raises(RemovedError, match=str(tmp_path)) as raised:
    run.live()
  assert raised.value.exit_code == 1
  assert run.step == 3


def test_a_full_disk_before_training_releases_the_folder(
  tmp_path, data, monkeypatch
):
  """Otherwise, a second attempt in a notebook finds it in use."""

  def full(*_):
    raise OSError(errno.ENOSPC, 'No space left on device')

  monkeypatch.setattr(training.folder, 'write', full)
  experiment = tiny_run.experiment(data, tiny_run.program())
  with pytest.raises(OSError, match='No space') as raised:
    training.run_experiment(experiment, tmp_path)
  assert raised.value.exit_code == 1
  Lock(tmp_path).release()


def test_a_step_that_does_not_fit_is_told_in_one_sentence(
  tmp_path, data, monkeypatch, caplog
):
  """Training goes on, and the steps before it are kept."""
  run = begun(tmp_path, data)
  full = lambda _: types.SimpleNamespace(free=1000 if run.step >= 4 else 10**9)
  monkeypatch.setattr(step_writer.shutil, 'disk_usage', full)
  with pytest.raises(SaveError, match='do not fit') as raised:
    run.live()
  assert (raised.value.logged, raised.value.exit_code) == (True, 1)
  assert run.step == 6
  errors = [each for each in caplog.records if each.levelname == 'ERROR']
  assert [each.exc_info for each in errors] == [None, None]
  assert Checkpoints(tmp_path / 'checkpoints').steps() == [2, 3]


def test_messages_of_orbax_and_asyncio_are_not_for_people():
  record = lambda name, path: types.SimpleNamespace(
    name=name, pathname=path, levelno=40
  )
  assert not console._is_for_people(record('asyncio', 'base_events.py'))
  assert not console._is_for_people(record('absl', 'lib/orbax/checkpoint/x.py'))
  assert console._is_for_people(record('absl', 'meliad_rec/main.py'))
