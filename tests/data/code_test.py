"""Packages as documents: whole files in order, no trace of the machine."""

import re
import sysconfig

import pytest

from meliad_rec.data.code import Code

SPLITS = ('train', 'validation', 'test')


@pytest.fixture
def python(tmp_path, monkeypatch):
  """A Python with a standard library and two installed packages."""
  stdlib, site = tmp_path / 'lib', tmp_path / 'lib' / 'site-packages'
  files = {
    stdlib / 'heapq.py': 'heap = 1\n',
    stdlib / 'json' / '__init__.py': 'import this\n',
    stdlib / 'json' / 'tool.py': 'tool = 1\n',
    stdlib / 'json' / 'data.txt': 'no code',
    stdlib / 'not_of_python.py': 'no = 1\n',
    site / 'mine' / 'b.py': 'b = "é"\n',
    site / 'mine' / 'a' / 'z.py': 'z = 1\n',
    site / 'mine-1.0.dist-info' / 'hook.py': 'no = 2\n',
    site / 'heapq.py': 'shadow = 1\n',
  }
  for path, text in files.items():
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  (site / 'mine' / 'c.py').write_bytes(b'\xff\xfe latin')
  paths = {'stdlib': stdlib, 'purelib': site, 'platlib': site}
  monkeypatch.setattr(sysconfig, 'get_paths', lambda: paths)
  return tmp_path


def read(code):
  return {name: text for s in SPLITS for name, text in code.read(s)}


def test_a_package_is_one_document_of_sorted_files(python):
  found = read(Code(min_bytes=1))
  assert found == {
    'heapq': '# heapq.py\nheap = 1\n\n',
    'json': ('# json/__init__.py\nimport this\n\n# json/tool.py\ntool = 1\n\n'),
    'mine': '# mine/a/z.py\nz = 1\n\n# mine/b.py\nb = "é"\n\n',
  }
  assert str(python) not in ''.join(found.values())


def test_files_that_cannot_be_read_are_counted(python, caplog):
  caplog.set_level('INFO')
  mine = python / 'lib' / 'site-packages' / 'mine'
  before = read(Code(min_bytes=1))
  (mine / 'link.py').symlink_to(python / 'nowhere.py')
  (mine.parent / 'gone.py').symlink_to(python / 'nowhere.py')
  assert read(Code(min_bytes=1)) == before
  assert 'left out 1 files that are not UTF-8' in caplog.text
  told = re.findall('left out (\\d) files', caplog.text.partition('\n')[2])
  assert sum(map(int, told)) == 3


def test_folders_of_packages_are_read_in_order_if_they_are_there(
  python, monkeypatch
):
  sites = [python / name for name in 'ab']
  for site in sites:
    site.mkdir()
    (site / 'two.py').write_text(f'from_{site.name}\n')
  for first, second in (sites, sites[::-1]):
    paths = {'stdlib': python / 'lib', 'purelib': first, 'platlib': second}
    monkeypatch.setattr(sysconfig, 'get_paths', lambda paths=paths: paths)
    assert f'from_{first.name}' in read(Code(min_bytes=1))['two']
  paths['platlib'] = python / 'nowhere'
  assert f'from_{first.name}' in read(Code(min_bytes=1))['two']


def test_the_standard_library_alone_can_be_read(python):
  assert set(read(Code(min_bytes=1, installed=False))) == {'heapq', 'json'}


def test_packages_are_cut_between_files_and_small_ones_left_out(python):
  assert read(Code(min_bytes=1, max_bytes=40))['json'] == (
    '# json/__init__.py\nimport this\n\n'
  )
  assert set(read(Code(min_bytes=30))) == {'json', 'mine'}


def test_the_python_that_runs_this_gives_every_split():
  for split in SPLITS:
    documents = dict(Code(installed=False).read(split))
    assert len(documents) >= 2
    for name, text in documents.items():
      assert text.startswith(f'# {name}')
      assert 20_000 <= len(text.encode()) <= 1_000_000
