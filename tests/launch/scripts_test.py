"""The scripts of launch/ on old systems, the quickstart, and the image."""

import contextlib
import importlib.util
import json
import os
from pathlib import Path
import re
import runpy
import shutil
import subprocess
import sys
from unittest import mock

import pytest

from tests.stand_ins import LAUNCH

SCRIPTS = sorted(LAUNCH.glob('*.sh'))
# These check the version of bash, or run on Linux hosts only.
NEW_BASH = {'slice.sh', 'tpu.sh', 'gke.sh', 'tpu_startup.sh', 'slurm_job.sh'}
OF_GNU_SED = {
  'a newline as an escape': r"s/[^/']*/[^/']*\\n",
  'the flag -u': r'sed -\w*u',
  'the flag -i without a suffix': r'sed -\w*i ',
  'no ; before }': r"'[^']*/p\}'",
}
OF_BASH_4 = {
  'an associative array': r'(declare|local) -A',
  'mapfile': r'\b(mapfile|readarray)\b',
  'changing case': r'\$\{\w+(,,?|\^\^?)\}',
  'waiting for any process': r'wait -n',
  'a reference': r'(declare|local) -n',
  'both streams to a pipe or file': r'\|&|&>>',
  'an array that may be empty': (
    r'(?<!\+)"\$\{(options|train|told|pids)\[@\]\}"'
  ),
}


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.name)
def test_scripts_avoid_what_old_tools_lack(script):
  banned = dict(OF_GNU_SED)
  if script.name not in NEW_BASH:
    banned |= OF_BASH_4
  for name, pattern in banned.items():
    assert not re.search(pattern, script.read_text()), name


def test_scripts_that_need_a_new_bash_check_it_first():
  for name in 'tpu.sh', 'gke.sh':
    text = (LAUNCH / name).read_text()
    assert text.index('slice.sh"') < text.index('action=')
  text = (LAUNCH / 'slice.sh').read_text()
  assert text.index('BASH_VERSINFO') < text.index('declare -A')


def test_shellcheck_finds_nothing():
  # The virtual environment has it, whether or not that is on the PATH.
  folders = [str(Path(sys.executable).parent), os.environ.get('PATH', '')]
  shellcheck = shutil.which('shellcheck', path=os.pathsep.join(folders))
  assert shellcheck, 'shellcheck is missing; install meliad_rec[test]'
  done = subprocess.run(
    [shellcheck, '-x', *SCRIPTS],
    cwd=LAUNCH.parent,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout


FOLDERS = ('WORKDIR', 'STORE')
PYTHON = """#!/bin/sh
echo "$*"
case "$*" in *'meliad_rec tokenize'*) mkdir -p runs/quickstart_text ;; esac
"""


@pytest.fixture
def checkout(tmp_path):
  (tmp_path / 'launch').mkdir()
  shutil.copy(LAUNCH / 'quickstart.sh', tmp_path / 'launch')
  (tmp_path / 'launch' / 'environment.sh').write_text('')
  python = tmp_path / '.venv' / 'bin' / 'python'
  python.parent.mkdir(parents=True)
  python.write_text(PYTHON)
  python.chmod(0o755)
  return tmp_path


def quickstart(checkout, *arguments, **folders):
  inherited = {k: v for k, v in os.environ.items() if k not in FOLDERS}
  return subprocess.run(
    ['bash', checkout / 'launch' / 'quickstart.sh', *arguments],
    env=inherited | folders,
    capture_output=True,
    text=True,
    check=True,
  ).stdout


def test_the_quickstart_tokenizes_once(checkout):
  """Packages that are installed later do not change the data of a run."""
  train = '-m meliad_rec.main --gin_file=experiments/quickstart '
  train += "--gin_param=STORE = 'runs/quickstart_text' "
  train += '--workdir=runs/quickstart --dry_run\n'
  first, again = (quickstart(checkout, '--dry_run') for _ in range(2))
  assert train in first and train in again
  assert first.count('-m meliad_rec tokenize --source=code') == 1
  assert 'tokenize' not in again


def test_the_command_to_train_longer_uses_the_same_folders(checkout):
  last = quickstart(checkout).splitlines()[-1]
  assert last.split(maxsplit=2)[2] == (
    "bash launch/quickstart.sh --gin_param='STEPS = 2_000'"
  )
  last = quickstart(checkout, WORKDIR='a b', STORE='c').splitlines()[-1]
  assert "WORKDIR='a b' STORE='c' bash launch/quickstart.sh" in last


ROOT = Path(__file__).parents[2]
TEXT = (ROOT / 'launch' / 'Dockerfile').read_text()


def instructions(name):
  """Returns the arguments of every such instruction."""
  return re.findall(rf'^{name} (.*)$', TEXT, re.M)


def package(root):
  """Returns the arguments of `setup` in this folder's setup.py."""
  with contextlib.chdir(root), mock.patch('setuptools.setup') as setup:
    runpy.run_path(str(root / 'setup.py'))
  return setup.call_args.kwargs


def test_the_image_copies_the_whole_package(tmp_path):
  for line in instructions('COPY'):
    *sources, target = line.split()
    for source in sources:
      path = ROOT / source
      assert path.exists(), source
      if path.is_dir():
        ignored = shutil.ignore_patterns('__pycache__')
        shutil.copytree(path, tmp_path / target, ignore=ignored)
      else:
        shutil.copy(path, tmp_path / target)
  assert package(tmp_path) == package(ROOT)


def test_the_image_installs_known_extras():
  [default] = instructions('ARG')
  named = [default, *re.findall(r'EXTRA=[\w,]+', TEXT)]
  extras = {e for each in named for e in each.split('=')[1].split(',')}
  assert {'tpu', 'gcs', 'cuda'} <= extras
  assert extras <= package(ROOT)['extras_require'].keys()


def test_the_image_has_a_supported_python():
  [image] = instructions('FROM')
  version = re.fullmatch(r'python:(\d+\.\d+)-slim', image)[1]
  known = package(ROOT)['classifiers']
  assert f'Programming Language :: Python :: {version}' in known


def test_the_image_runs_a_module():
  [command] = instructions('ENTRYPOINT')
  *python, module = json.loads(command)
  assert python == ['python', '-m']
  assert importlib.util.find_spec(module)
