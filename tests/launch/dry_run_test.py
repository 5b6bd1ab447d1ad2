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


@pytest.mark.parametrize('name', ['tpu', 'gke', 'slurm', 'gpu'])
def test_commands_and_their_output(tmp_path, name):
  programs = 'gcloud', 'python', 'xpk', 'kubectl', 'sbatch', 'ssh'
  machine = StandIns(tmp_path, **dict.fromkeys(programs, ''))
  golden = GOLDEN / f'{name}.txt'
  expected = golden.read_text()
  found = []
  for command in re.findall(r'^\$ (.*)$', expected, re.M):
    found += [f'$ {command}', *output(machine, tmp_path, command), '']
    assert machine.calls() == [], command
  assert {path.name for path in tmp_path.iterdir()} == {*programs}
  if os.environ.get('UPDATE_GOLDEN'):
    golden.write_text('\n'.join(found))
  assert '\n'.join(found) == expected


def output(machine, folder, command):
  """Returns the lines of a command, without what differs between machines."""
  words = shlex.split(command)
  env = {'TMPDIR': str(folder)}
  while '=' in words[0]:
    key, _, value = words.pop(0).partition('=')
    env[key] = value
  done = machine.run(*words, **env)
  text = done.stdout + done.stderr
  # The script that a slice starts with is tested in tpu_test.py.
  text = re.sub(r'(?m)^  # Trains on a host(.*\n  )*.*\n', '  ...\n', text)
  text = re.sub(r'[^\s=]*/tmp\.\w+', 'TEMPORARY', text)
  text = re.sub(r'ended-\d+', 'ended-TIME', text)
  text = text.replace(str(LAUNCH), 'launch').replace(str(folder), 'HERE')
  return [
    *text.splitlines(),
    *([f'[{done.returncode}]'] * bool(done.returncode)),
  ]
