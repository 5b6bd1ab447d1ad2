"""Files that grow, and how they come to a bucket."""

from pathlib import Path

from etils import epath
import pytest

from meliad_rec.storage.mirror import Mirror
from tests import bucket


def test_on_the_disk_it_is_the_folder_itself(tmp_path):
  mirror = Mirror(tmp_path / 'run')
  assert mirror.folder == tmp_path / 'run'
  mirror.sync()
  assert not (tmp_path / 'run').exists()


@pytest.fixture
def far(tmp_path, monkeypatch):
  """The folder that gs://b/run is."""
  with bucket.served(tmp_path, monkeypatch):
    yield tmp_path / 'b' / 'run'


def test_what_has_changed_is_brought(far):
  mirror = Mirror('gs://b/run')
  (mirror.folder / 'a').write_text('one')
  (mirror.folder / 'deep').mkdir()
  (mirror.folder / 'deep' / 'b').write_text('two')
  assert not far.exists()
  mirror.sync()
  assert (far / 'a').read_text() == 'one'
  assert (far / 'deep' / 'b').read_text() == 'two'
  (far / 'a').unlink()
  with (mirror.folder / 'deep' / 'b').open('a') as file:
    file.write(', three')
  mirror.sync()
  assert (far / 'deep' / 'b').read_text() == 'two, three'
  assert not (far / 'a').exists()


def test_what_fails_is_said_and_brought_the_next_time(far, monkeypatch, caplog):
  mirror = Mirror('gs://b/run')
  for name in 'ab':
    (mirror.folder / name).write_text(name)
  write = type(epath.Path('gs://b')).write_bytes

  def broken(path, content):
    if path.name == 'a':
      raise RuntimeError('503, try again')
    write(path, content)

  with monkeypatch.context() as patched:
    patched.setattr(type(epath.Path('gs://b')), 'write_bytes', broken)
    mirror.sync()
  assert [path.name for path in far.iterdir()] == ['b']
  assert 'gs://b/run/a cannot be written, yet: 503, try again' in caplog.text
  mirror.sync()
  assert (far / 'a').read_text() == 'a'


def test_it_begins_with_what_is_there(far):
  far.mkdir(parents=True)
  (far / 'a').write_text('one')
  (far / 'b').write_text('two')
  mirror = Mirror('gs://b/run', ('a', 'c'))
  assert [path.name for path in mirror.folder.iterdir()] == ['a']
  assert (mirror.folder / 'a').read_text() == 'one'


def test_its_folder_on_the_disk_goes_with_it(far):
  mirror = Mirror('gs://b/run')
  folder = Path(mirror.folder)
  assert folder.is_dir()
  del mirror
  assert not folder.exists()
