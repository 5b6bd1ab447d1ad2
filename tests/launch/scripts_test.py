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
from tests.stand_ins import StandIns

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


@pytest.mark.parametrize(
  'words',
  [
    *('tpu.sh', 'gke.sh start a', 'slurm.sh 2 x runs/a', 'slurm.sh 0 8 runs/a'),
    *('slurm.sh 2 8', 'gpu.sh', 'gpu.sh a,--gin_file=x', 'gpu.sh --help'),
    *('local_pod.sh', 'local_pod.sh 0', 'local_pod.sh --workdir=a', 'pg19.sh'),
  ],
)
def test_without_what_a_launcher_needs_it_shows_its_head(tmp_path, words):
  done = StandIns(tmp_path).run(*words.split())
  text = (LAUNCH / words.split()[0]).read_text()
  head = re.search(r'\n(# .*?\n)set ', text, re.S)[1]
  assert done.returncode == 2
  assert done.stderr == re.sub('(?m)^# ?', '', head)


def said_by(script, tmp_path, *arguments, **variables):
  """Returns the lines of a script, with commands of Python in place of runs.

  The checkout is in a folder of the one where the script is started.
  """
  root = tmp_path / 'checkout'
  (root / 'launch').mkdir(exist_ok=True, parents=True)
  for name in script, 'this_code.sh', 'common.sh':
    shutil.copy(LAUNCH / name, root / 'launch')
  (root / 'launch' / 'environment.sh').write_text('')
  python = root / '.venv' / 'bin' / 'python'
  python.parent.mkdir(parents=True, exist_ok=True)
  made = 'case "$3" in tokenize) mkdir -p "${5#--out=}" ;; esac'
  python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*"\n{made}\n')
  python.chmod(0o755)
  path = str(root / 'launch' / script)
  done = StandIns(tmp_path).run(path, *arguments, **variables)
  assert done.returncode == 0, done.stderr
  return done.stdout.splitlines()


def test_the_quickstart_tokenizes_once_and_says_how_to_go_on(tmp_path):
  """Packages that are installed later do not change the data of a run."""

  def said(*flags, **folders):
    folders = {'WORKDIR': '', 'STORE': ''} | folders
    return said_by('quickstart.sh', tmp_path, *flags, **folders)

  train = (
    '-m meliad_rec train --gin_file=experiments/quickstart '
    "--gin_param=STORE = 'runs/quickstart_text' "
    '--workdir=runs/quickstart'
  )
  more = "bash launch/quickstart.sh --gin_param='STEPS = 2_000'"
  first, again = said(), said()
  assert train in first and train in again
  tokenize = '-m meliad_rec tokenize --source=code --out=runs/quickstart_text'
  assert tokenize in first and tokenize not in again
  assert first[-1].split(maxsplit=2)[2] == more
  # Folders are relative to where the script is started.
  folders = {'WORKDIR': 'a b', 'STORE': 'c'}
  elsewhere = said(**folders)
  there = f'WORKDIR={tmp_path}/a\\ b STORE={tmp_path}/c'
  assert f'{there} {more}' in elsewhere[-1]
  assert f'--workdir={tmp_path}/a b' in ' '.join(elsewhere)
  assert f'--workdir={tmp_path}/a\\ b --split=test' in elsewhere[-2]
  # The shell leaves ~ in quotes as it is.
  there = {'WORKDIR': '~/a b', 'STORE': '~/c', 'HOME': str(tmp_path)}
  assert said(**there) == said(**folders)
  # Gin reads quotes and backslashes in the folder's name as they are.
  odd = ' '.join(said(STORE="a'b\\c"))
  assert f"STORE = '{tmp_path}/a\\'b\\\\c' " in odd
  # The commands are for the checkout.
  root = tmp_path / 'checkout'
  go = f'First:          cd {root}'
  assert go in first and go in elsewhere
  script = str(root / 'launch' / 'quickstart.sh')
  inside = StandIns(root).run(script, WORKDIR='', STORE='').stdout
  assert more in inside and 'cd ' not in inside
  assert said('--dry_run')[-1] == f'{train} --dry_run'


def test_the_showpiece_trains_both_models_and_compares_them(tmp_path):
  said = said_by(
    *('showpiece.sh', tmp_path, '--gin_param=STEPS = 9'), OUT='a b', STORE=''
  )
  lines = [line.split(' ', 2)[2] for line in said if line.startswith('-m ')]
  npz, out = 'seed0/test_first_65536.npz', f'{tmp_path}/a b'
  expected = [
    'tokenize --source=code --out=runs/quickstart_text',
    'reproduce cpu/code --rows=slide,rec --jobs=2 --splits=test --tokens=65536 '
    f"--out={out} --gin_param=STORE = 'runs/quickstart_text' "
    '--gin_param=STEPS = 9',
    f'evaluate --compare={out}/slide_{npz},{out}/rec_{npz} --unit=word '
    f'--plot={out}/gain.png',
  ]
  assert lines == expected


def test_pg19_makes_a_vocabulary_and_then_a_store(tmp_path):
  python = {'PYTHON': str(tmp_path / 'checkout/.venv/bin/python')}
  said = said_by('pg19.sh', tmp_path, 'a b', '--path=BOOKS', **python)
  lines = [line.split(' ', 2)[2] for line in said if line.startswith('-m ')]
  assert lines == [
    'train_vocab --source=pg19 --out=a b/pieces.model --size=32000 '
    '--path=BOOKS',
    'tokenize --source=pg19 --out=a b/store --vocabulary=a b/pieces.model '
    '--path=BOOKS',
  ]


ROOT = Path(__file__).parents[2]


def package(root):
  """Returns the arguments of `setup` in this folder's setup.py."""
  with contextlib.chdir(root), mock.patch('setuptools.setup') as setup:
    runpy.run_path(str(root / 'setup.py'))
  return setup.call_args.kwargs


def test_the_image_has_the_whole_package_and_its_extras(tmp_path):
  text = (LAUNCH / 'Dockerfile').read_text()
  of = lambda name: re.findall(rf'^{name} (.*)$', text, re.M)
  for line in of('COPY'):
    *sources, target = line.split()
    for source in sources:
      path = ROOT / source
      if path.is_dir():
        ignored = shutil.ignore_patterns('__pycache__')
        shutil.copytree(path, tmp_path / target, ignore=ignored)
      else:
        shutil.copy(path, tmp_path / target)
  whole = package(ROOT)
  assert package(tmp_path) == whole
  [default] = of('ARG')
  named = [default, *re.findall(r'EXTRA=[\w,]+', text)]
  extras = {e for each in named for e in each.split('=')[1].split(',')}
  assert {'tpu', 'gcs', 'cuda'} <= extras <= whole['extras_require'].keys()
  [image] = of('FROM')
  version = re.fullmatch(r'python:(\d+\.\d+)-slim', image)[1]
  python = f'Programming Language :: Python :: {version}'
  assert python in whole['classifiers']
  [command] = of('ENTRYPOINT')
  *python, module = json.loads(command)
  assert python == ['python', '-m'] and importlib.util.find_spec(module)
