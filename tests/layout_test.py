"""The layout: which folder imports which, and what lies where."""

import ast
import functools
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
  'explore',
  'planning',
  'runs',
  'training',
  'reinforcement',
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
LATE = {'PIL', 'matplotlib', 'pandas', 'tensorboardX', 'tqdm', 'xarray'}
HEAVY = {'tensorflow', 'tensorflow_datasets', 'tensorflow_text', 'seqio'}
# Files that import these, inside functions.
TENSORFLOW = {'data/lra', 'data/pg19', 'data/seqio_tasks'}
GIN = {'config/config', 'config/renames', 'config/values'}


@functools.cache
def files():
  """Names of the package's files: 'cell', 'data/lanes'."""
  return sorted(
    path.relative_to(PACKAGE).with_suffix('').as_posix()
    for path in PACKAGE.rglob('*.py')
    if path.name != '__init__.py'
  )


@functools.cache
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


@functools.cache
def own_imports(name):
  """Names of the package's files that a file imports, wherever it does so."""
  own = 'meliad_rec.'
  found = {d for d in imports(ast.walk(tree(name))) if d.startswith(own)}
  paths = {dotted.removeprefix(own).replace('.', '/') for dotted in found}
  known = set(files())
  paths = {path if path in known else path.rpartition('/')[0] for path in paths}
  return paths - {''}


def room(name):
  """The folder of a file, as ROOMS calls it."""
  folder = name.rpartition('/')[0] or '.'
  return 'kernels' if folder.startswith('kernels/') else folder


def test_imports_point_down():
  """Where this fails, see ROOMS."""
  for name in files():
    for other in own_imports(name):
      if room(other) == room(name):
        assert name not in own_imports(other), f'{name} and {other}'
      else:
        above = ROOMS.index(room(other)) < ROOMS.index(room(name))
        assert not above, f'{name} imports {other}'


def test_data_are_sorted_in_the_same_way_on_every_machine():
  """How NumPy orders equal values depends on the CPU, unless it is stable."""
  calls = [
    (name, node)
    for name in files()
    if name.startswith('data/')
    for node in ast.walk(tree(name))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == 'np.argsort'
  ]
  assert len(calls) > 3
  for name, node in calls:
    kinds = [ast.unparse(k.value) for k in node.keywords if k.arg == 'kind']
    assert kinds == ["'stable'"], f'{name}:{node.lineno}'


def test_only_the_two_doors_lie_loose():
  loose = {path.stem for path in PACKAGE.glob('*.py')}
  assert loose == {'__init__', '__main__', 'cli', 'main'}


def test_gin_and_tensorflow_are_known_to_few_files():
  """TensorFlow is imported in functions of these files only."""
  top = lambda nodes: {dotted.split('.')[0] for dotted in imports(nodes)}
  for name in files():
    whole = tree(name)
    found = top(ast.walk(whole))
    assert name in GIN or 'gin' not in found, name
    assert name in TENSORFLOW or not found & HEAVY, name
    nodes = [
      node
      for statement in whole.body
      if not isinstance(statement, ast.FunctionDef | ast.ClassDef)
      for node in ast.walk(statement)
    ]
    assert not top(nodes) & HEAVY, name


def test_files_are_short():
  for name in files():
    length = len((PACKAGE / f'{name}.py').read_text().splitlines())
    assert length < 500, f'{name} has {length} lines, and the limit is 500.'


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


def known():
  """Names of all files that belong to the checkout."""
  listed = subprocess.run(
    ['git', 'ls-files', '-co', '--exclude-standard'],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  if listed.returncode:
    pytest.skip('not a git checkout')
  return listed.stdout.splitlines()


def test_nothing_else_lies_at_the_top():
  top = {name.split('/')[0] for name in known()}
  assert {name for name in top - TOP if not name.startswith('.')} == set()


def test_gin_files_are_found_from_an_installed_wheel(tmp_path):
  for name in known():
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
