"""The layout: which folder imports which, and what lies where."""

import ast
import os
from pathlib import Path
import shutil
import subprocess
import sys

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / 'meliad_rec'

# A folder imports only folders below it, and no two files import each other.
# `.` is the top of the package; folders in kernels/ count as kernels.
ROOMS = [
  '.',
  'commands',
  'benchmarks',
  'planning',
  'runs',
  'training',
  'generation',
  'evaluation',
  'archs',
  'models',
  'layers',
  'recurrence',
  'data/synthetic',
  'data',
  'report',
  'metrics',
  'kernels',
  'storage',
  'config',
  'distributed',
]

TOP = {'setup.py', 'README.md', 'RESULTS.md', 'CHANGELOG.md', 'CITATION.cff'}
TOP |= {'LICENSE'}
TOP |= {'meliad_rec', 'gin', 'launch', 'tests', 'colab'}

# Functions import these when they need them, as they do HEAVY.
LATE = {'matplotlib', 'tensorboardX', 'tqdm'}
HEAVY = {'tensorflow', 'tensorflow_datasets', 'tensorflow_text', 'seqio'}
# Files that import these, inside functions.
TENSORFLOW = {'data/seqio_tasks', 'data/text'}
GIN = {'config/config', 'config/renames', 'config/values'}


def files():
  """Names of the package's files: 'cell', 'data/lanes'."""
  return sorted(
    path.relative_to(PACKAGE).with_suffix('').as_posix()
    for path in PACKAGE.rglob('*.py')
    if path.name != '__init__.py'
  )


def tree(name):
  return ast.parse((PACKAGE / f'{name}.py').read_text(encoding='utf-8'))


def imports(nodes):
  """Dotted names that these statements import."""
  for node in nodes:
    match node:
      case ast.Import():
        yield from (alias.name for alias in node.names)
      case ast.ImportFrom():
        yield from (f'{node.module}.{alias.name}' for alias in node.names)


def own_imports(name):
  """Names of the package's files that a file imports, wherever it does so."""
  for dotted in imports(ast.walk(tree(name))):
    first, *parts = dotted.split('.')
    if first == 'meliad_rec':
      whole = '/'.join(parts)
      yield whole if whole in files() else whole.rpartition('/')[0]


def room(name):
  """The folder of a file, as ROOMS calls it."""
  folder = name.rpartition('/')[0] or '.'
  return 'kernels' if folder.startswith('kernels/') else folder


@pytest.mark.parametrize('name', files())
def test_imports_point_down(name):
  for other in filter(None, own_imports(name)):
    if room(other) == room(name):
      assert name not in own_imports(other), (
        f'{name} and {other} import each other.'
      )
    else:
      assert ROOMS.index(room(other)) > ROOMS.index(room(name)), (
        f'meliad_rec/{name}.py imports {other}, from a folder that ROOMS of '
        'tests/layout_test.py has above its own.'
      )


def test_only_the_two_doors_lie_loose():
  loose = {path.stem for path in PACKAGE.glob('*.py')}
  assert loose == {'__init__', '__main__', 'cli', 'main'}


@pytest.mark.parametrize('name', files())
def test_only_the_configuration_knows_gin(name):
  found = {dotted.split('.')[0] for dotted in imports(ast.walk(tree(name)))}
  assert name in GIN or 'gin' not in found


@pytest.mark.parametrize('name', files())
def test_tensorflow_is_imported_in_functions_of_the_data_files_only(name):
  whole = tree(name)
  found = {dotted.split('.')[0] for dotted in imports(ast.walk(whole))}
  assert name in TENSORFLOW or not found & HEAVY
  nodes = [
    node
    for statement in whole.body
    if not isinstance(statement, ast.FunctionDef | ast.ClassDef)
    for node in ast.walk(statement)
  ]
  assert not {dotted.split('.')[0] for dotted in imports(nodes)} & HEAVY


@pytest.mark.parametrize('name', files())
def test_files_are_short(name):
  length = len((PACKAGE / f'{name}.py').read_text().splitlines())
  assert length < 500, (
    f'meliad_rec/{name}.py has {length} lines, and the limit is 500.'
  )


def test_importing_the_package_is_quick_and_without_tensorflow():
  names = [
    f'meliad_rec.{name.replace("/", ".")}'
    for name in files()
    if room(name) not in ('.', 'commands')
  ]
  code = f"""
import sys, time
start = time.perf_counter()
import meliad_rec
print(time.perf_counter() - start)
import importlib
for name in {names!r}:
  importlib.import_module(name)
print(*sorted({HEAVY | LATE!r} & set(sys.modules)))
"""
  done = subprocess.run(
    [sys.executable, '-c', code],
    env={**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  seconds, heavy = done.stdout.split('\n')[:2]
  assert float(seconds) < 2
  assert heavy == ''


def test_nothing_else_lies_at_the_top():
  known = subprocess.run(
    ['git', 'ls-files', '-co', '--exclude-standard'],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  if known.returncode:
    pytest.skip('not a git checkout')
  top = {line.split('/')[0] for line in known.stdout.splitlines()}
  assert {name for name in top - TOP if not name.startswith('.')} == set()


@pytest.mark.slow
def test_gin_files_are_found_from_an_installed_wheel(tmp_path):
  names = subprocess.run(
    ['git', 'ls-files', '-co', '--exclude-standard'],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  ).stdout.splitlines()
  for name in names:
    if (ROOT / name).is_file() and name.startswith(
      ('meliad_rec', 'gin', 'set')
    ):
      (tmp_path / 'source' / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(ROOT / name, tmp_path / 'source' / name)
  pip = [sys.executable, '-m', 'pip', '--no-input']
  offline = ['--no-deps', '--no-build-isolation', '--target', 'installed']
  subprocess.run(
    [*pip, 'install', *offline, str(tmp_path / 'source')],
    cwd=tmp_path,
    check=True,
  )
  code = """
import gin
from meliad_rec.config import files
print(files.__file__)
print(*sorted(path.name for path in files.root().rglob('*.*')))
"""
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd='/',
    env={**os.environ, 'PYTHONPATH': str(tmp_path / 'installed')},
    capture_output=True,
    text=True,
    check=True,
  )
  where, found = done.stdout.splitlines()
  assert Path(where).is_relative_to(tmp_path / 'installed')
  assert found.split() == sorted(p.name for p in (ROOT / 'gin').rglob('*.*'))


def test_gin_is_no_package():
  """With an __init__.py it would shadow the gin library."""
  assert list((ROOT / 'gin').rglob('*.py')) == []
