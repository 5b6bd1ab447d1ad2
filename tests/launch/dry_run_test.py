"""Launchers: what they would run, and how they refuse mistakes.

Each golden/NAME.txt holds commands after `$` and their output. A command with
--dry_run, or one with a mistake, runs nothing. After an intended change:

  UPDATE_GOLDEN=1 python -m pytest tests/launch/dry_run_test.py && git diff
"""

import os
from pathlib import Path
import re
import shlex

import pytest

from tests.stand_ins import LAUNCH
from tests.stand_ins import StandIns

GOLDEN = Path(__file__).with_name('golden')
PROGRAMS = 'gcloud', 'python', 'xpk', 'kubectl', 'sbatch', 'ssh'
every = pytest.mark.parametrize('name', ['tpu', 'gke', 'slurm', 'gpu'])


@pytest.fixture
def machine(tmp_path):
  made = StandIns(tmp_path, **dict.fromkeys(PROGRAMS, ''))
  made.answer('kubectl', '[ "$1" != get ] || echo POD')
  return made


@every
def test_commands_and_their_output(machine, tmp_path, name):
  golden = GOLDEN / f'{name}.txt'
  expected = golden.read_text()
  found = []
  for command in commands(name):
    done = run(machine, tmp_path, *parsed(command))
    found += [f'$ {command}', *shown(done, tmp_path), '']
    assert machine.calls() == [], command
  assert {path.name for path in tmp_path.iterdir()} == {*PROGRAMS}
  if os.environ.get('UPDATE_GOLDEN'):
    golden.write_text('\n'.join(found))
  assert '\n'.join(found) == expected


@every
def test_what_a_dry_run_prints_is_what_runs(machine, tmp_path, name):
  """Bash reads the printed lines, and makes the calls of the script."""
  dry = [parsed(each) for each in commands(name) if 'dry_run' in each.lower()]
  for words, env in dry:
    done = run(machine, tmp_path, words, env)
    if done.returncode:
      continue
    # Indented lines are a script that is uploaded.
    text = re.sub(r'(?m)^  .*\n', '', done.stdout)
    (tmp_path / 'printed').write_text(text)
    run(machine, tmp_path, [str(tmp_path / 'printed')], {})
    printed = calls(machine)
    real = [word for word in words if word != '--dry_run']
    done = run(machine, tmp_path, real, env | {'DRY_RUN': ''})
    assert done.returncode == 0, done.stderr
    assert calls(machine) == printed != []
  made = {path.name for path in tmp_path.iterdir()} - {*PROGRAMS, 'printed'}
  # SLURM writes its output there, unless the run is in a bucket.
  assert made == ({'runs'} if name == 'slurm' else set())


def commands(name):
  return re.findall(r'^\$ (.*)$', (GOLDEN / f'{name}.txt').read_text(), re.M)


def parsed(command):
  """Returns the words of a command, and the variables set before it."""
  words, env = shlex.split(command), {}
  while '=' in words[0]:
    key, _, env[key] = words.pop(0).partition('=')
  return words, env


def run(machine, folder, words, env):
  return machine.run(*words, TMPDIR=str(folder), **env)


def calls(machine):
  """Returns all calls, in order of host, without names of temporary files."""
  found = [[temporary(word) for word in call] for call in machine.calls()]
  return sorted(found) if found and found[0][0] == 'ssh' else found


def temporary(text):
  return re.sub(r'[^\s=]*/tmp\.\w+', 'TEMPORARY', text)


def shown(done, folder):
  """Returns output lines, without what differs between machines."""
  text = done.stdout + done.stderr
  # The script that a slice starts with is tested in jobs_test.py.
  text = re.sub(r'(?m)^  # Trains on a host(.*\n  )*.*\n', '  ...\n', text)
  text = re.sub(r'ended-\d+', 'ended-TIME', temporary(text))
  text = text.replace(str(LAUNCH), 'launch').replace(str(folder), 'HERE')
  code = done.returncode
  return [*text.splitlines(), *([f'[{code}]'] if code else [])]
