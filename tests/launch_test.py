"""The scripts of launch/, with a Python that only says what it was given."""

import os
from pathlib import Path
import shutil
import subprocess

import pytest

PLACES = ('WORKDIR', 'STORE')
LAUNCH = Path(__file__).parents[1] / 'launch'
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


def quickstart(checkout, *arguments, **places):
  inherited = {k: v for k, v in os.environ.items() if k not in PLACES}
  return subprocess.run(
    ['bash', checkout / 'launch' / 'quickstart.sh', *arguments],
    env=inherited | places,
    capture_output=True,
    text=True,
    check=True,
  ).stdout


def test_the_text_is_tokenised_once_and_trained_on_ever_after(checkout):
  """Packages that are installed later are no data of a run that began."""
  train = '-m meliad_rec.main --gin_file=experiments/quickstart '
  train += "--gin_param=STORE = 'runs/quickstart_text' "
  train += '--workdir=runs/quickstart --dry_run\n'
  first, again = (quickstart(checkout, '--dry_run') for _ in range(2))
  assert train in first and train in again
  assert first.count('-m meliad_rec tokenize --source=code') == 1
  assert 'tokenize' not in again


def test_the_command_to_train_longer_names_the_same_places(checkout):
  told = quickstart(checkout).splitlines()[-1]
  assert told.split(maxsplit=2)[2] == (
    "bash launch/quickstart.sh --gin_param='STEPS = 2_000'"
  )
  told = quickstart(checkout, WORKDIR='a b', STORE='c').splitlines()[-1]
  assert "WORKDIR='a b' STORE='c' bash launch/quickstart.sh" in told
