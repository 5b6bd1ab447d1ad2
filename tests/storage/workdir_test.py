"""Folders of runs, and that only one training writes to one."""

import errno
import fcntl
import logging
from pathlib import Path
import subprocess
import sys

from etils import epath
import jax
import pytest

from meliad_rec.distributed import hosts
from meliad_rec.runs.trained_run import load_run
from meliad_rec.storage.workdir import full_name
from meliad_rec.storage.workdir import local
from meliad_rec.storage.workdir import LOCK
from meliad_rec.storage.workdir import Lock
from meliad_rec.storage.workdir import place
from meliad_rec.storage.workdir import upload
from tests import bucket


@pytest.mark.parametrize('path', ['s3://b', Path('s3://b'), 'file:///a'])
def test_another_address_is_refused(path):
  for opened in place, load_run:
    with pytest.raises(ValueError, match=f'{path} cannot hold a run') as told:
      opened(path)
    assert '--' not in str(told.value)  # Some commands take no --workdir.
  with pytest.raises(ValueError, match='A store'):
    local(path, 'A store')


def test_a_bucket_and_a_folder():
  for name in 'runs/a', '/a/b:c', 'a:b', '../x':
    assert place(name) == local(name, 'A store') == Path(name)
  assert place('~/a') == local('~/a', 'A store') == Path.home() / 'a'
  assert str(place('gs://bucket/run') / 'a') == 'gs://bucket/run/a'
  assert full_name('gs://bucket/run') == 'gs://bucket/run'
  assert full_name('a/../b') == str(Path('b').absolute())
  with pytest.raises(ValueError, match='gs:/bucket/run'):
    place(Path('gs://bucket/run'))


def test_a_bucket_has_no_lock(caplog, tmp_path, monkeypatch):
  with caplog.at_level(logging.INFO), bucket.served(tmp_path, monkeypatch):
    Lock(place('gs://bucket/run')).release()
  assert 'no other run trains in gs://bucket/run' in caplog.text
  # It needs a library.
  monkeypatch.setitem(sys.modules, 'google.cloud.storage', None)
  with pytest.raises(ValueError, match='Install meliad_rec.gcs..'):
    Lock(place('gs://bucket/run'))


@pytest.mark.parametrize('code', [403, 404, 503])
def test_a_bucket_that_cannot_be_read(code, tmp_path, monkeypatch):
  def refuse(name):
    assert name == 'bucket'
    raise type('Refused', (Exception,), {'code': code})()

  with bucket.served(tmp_path, monkeypatch):
    client = sys.modules['google.cloud.storage'].Client()
    monkeypatch.setattr(client, 'get_bucket', refuse)
    with pytest.raises(ValueError) as error:
      Lock(place('gs://bucket/run'))
  temporary = code == 503
  assert ('storage.buckets.get' in str(error.value)) == (not temporary)
  assert getattr(error.value, 'exit_code', 2) == (1 if temporary else 2)
  assert ('cannot be read now (Refused)' in str(error.value)) == temporary


def test_a_bucket_without_a_login(tmp_path, monkeypatch):
  def client():
    raise OSError('Project was not passed.\nSee below.')

  with bucket.served(tmp_path, monkeypatch):
    storage = sys.modules['google.cloud.storage']
    monkeypatch.setattr(storage, 'Client', client)
    with pytest.raises(ValueError, match='passed[)].*GOOGLE_CLOUD_PROJECT'):
      Lock(place('gs://bucket/run'))


def test_a_second_lock_is_refused_until_the_first_is_released(tmp_path):
  folder = tmp_path / 'new' / 'run'
  first = Lock(folder)
  with pytest.raises(ValueError, match=f'Another training .* in {folder}[.]'):
    Lock(folder)
  first.release()
  first.release()
  with Lock(folder) as third:
    pass
  with pytest.raises(ValueError, match='Another training'):
    Lock(folder)
  third.release()
  # A body that fails releases it.
  with pytest.raises(KeyError), Lock(folder):
    raise KeyError
  Lock(folder).release()


def test_a_killed_process_releases_it(tmp_path):
  program = f"""
import fcntl, time
file = open({str(tmp_path / LOCK)!r}, 'a')
fcntl.flock(file, fcntl.LOCK_EX)
print('held', flush=True)
time.sleep(60)
"""
  child = subprocess.Popen(
    [sys.executable, '-c', program], stdout=subprocess.PIPE, text=True
  )
  assert child.stdout.readline() == 'held\n'
  with pytest.raises(ValueError, match='Another training'):
    Lock(tmp_path)
  child.kill()
  child.communicate()
  Lock(tmp_path).release()


def test_a_folder_that_cannot_be_made_or_locked(tmp_path, monkeypatch, caplog):
  (tmp_path / 'file').touch()
  with pytest.raises(ValueError, match='--workdir'):
    Lock(tmp_path / 'file' / 'run')

  def flock(*_):
    raise OSError(errno.ENOLCK, 'No locks available')

  monkeypatch.setattr(fcntl, 'flock', flock)
  Lock(tmp_path).release()
  assert 'No locks available' in caplog.text


def test_all_hosts_fail_if_process_0_does(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  monkeypatch.setattr(hosts, 'any_of', lambda flag: True)
  with pytest.raises(ValueError, match='Process 0'):
    Lock(tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_an_upload_goes_on_after_a_failure(tmp_path, monkeypatch, caplog):
  source, far = tmp_path / 'here', tmp_path / 'b' / 'run'
  (source / 'deep').mkdir(parents=True)
  (source / 'a').write_text('one')
  (source / 'deep' / 'b').write_text('two')
  bucket_path = type(epath.Path('gs://b'))
  write = bucket_path.write_bytes

  def broken(path, content):
    if path.name == 'a':
      raise RuntimeError('503, try again')
    write(path, content)

  with bucket.served(tmp_path, monkeypatch):
    target = epath.Path('gs://b/run')
    with monkeypatch.context() as patched:
      patched.setattr(bucket_path, 'write_bytes', broken)
      upload(source, target)
    assert [path.name for path in far.iterdir()] == ['deep']
    assert 'gs://b/run/a was not written: 503, try again' in caplog.text
    (source / 'deep' / 'b').write_text('two, three')
    upload(source, target)
  assert (far / 'a').read_text() == 'one'
  assert (far / 'deep' / 'b').read_text() == 'two, three'
